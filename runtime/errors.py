"""The exceptions of this room.

    EngineError
    ├── ConfigError                     malformed settings, or what this machine cannot satisfy
    ├── WeightsError                    a checkpoint incomplete, damaged or made for another model
    ├── CompileError(stem, arch, log)   a kernel that does not compile
    ├── CaptureError(node)              a plan that cannot become a CUDA graph
    └── DeviceError                     a device that is missing, out of memory or has failed
    RequestError(field, message)        one request that can never run; the engine is fine
    SnapshotError                       bytes that are no state of this engine; it prefills instead

Every text is one sentence a stranger can act on: what, value, limit, remedy. The last two stand
beside the tree because they are the fault of a request or of somebody's bytes, not of the engine:
who catches `EngineError` must not catch them by accident.
"""


class EngineError(Exception):
    """Base of everything that stops the engine."""


class ConfigError(EngineError):
    """A setting is malformed or cannot be satisfied."""


class WeightsError(EngineError):
    """The checkpoint is incomplete, damaged or made for another model."""


class CompileError(EngineError):
    """A kernel does not compile; `log` is what the compiler said."""

    def __init__(self, stem: str, arch: str, log: str) -> None:
        """Keep the three parts apart for whoever prints them."""
        super().__init__(f"{stem} does not compile for {arch}:\n{log}")
        self.stem, self.arch, self.log = stem, arch, log


class CaptureError(EngineError):
    """A node of a plan cannot be captured into a CUDA graph."""

    def __init__(self, node: str, reason: str = "capture failed") -> None:
        """Name the node as the plan's text does."""
        super().__init__(f"node {node}: {reason}")
        self.node = node


class DeviceError(EngineError):
    """A device is missing, out of memory or has failed."""


class RequestError(Exception):
    """A generation request that can never run; `field` names the offending part of it."""

    def __init__(self, field: str, message: str) -> None:
        """Name the field as the caller spelt it."""
        super().__init__(message)
        self.field, self.message = field, message


class SnapshotError(Exception):
    """Bytes of another version, layout, size or range than was asked to be restored."""
