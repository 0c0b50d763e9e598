"""How the server shall run: one frozen object, handed to each process in `UF_…` variables.

The command line writes them (`environment`), gunicorn's processes, the supervisor and the engine
process read them back (`ServerConfig.from_env`). No other file of this room reads the environment.
What concerns the engine alone (`UF_BACKEND`, `UF_CACHE_DIR`, …) is read by
`ultraflash.runtime.config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultraflash.server.errors import StartError
from ultraflash.server.run_dir import DRAINING, SOCKET, STATUS, make_run_dir, remove_run_dir

SPARE_THREADS = 32  # for requests that are being received, and short ones, beside the streams
_HEAD_S = 10.0
_SHORT_THREADS = 8  # of these, which no body may take: /readyz must answer
_MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one server.

    Units: `context` tokens (None: the checkpoint's own limit); names in `_s` seconds;
    `max_waiting_tokens` prompt tokens of requests that have not begun.
    """

    checkpoint: Path | None = None  # None: the bundled tiny one
    host: str = "127.0.0.1"
    port: int = 8000
    listen_fd: int | None = None  # a socket already bound by the command line
    context: int | None = None
    max_sequences: int = 4
    world: int | None = None  # None: as many ranks as GPUs are named
    gpus: str | None = None  # GPU numbers, "0,1"; handed on to the engine as they are
    max_waiting: int = 64
    max_waiting_tokens: int = 4_000_000
    drain_s: float = 2.0
    graceful_s: float = 600.0
    keep_alive_s: float = 10.0
    body_s: float = 60.0  # that a request's body may take to arrive; a head: at most _HEAD_S
    run_dir: Path | None = None

    @classmethod
    def from_env(cls) -> ServerConfig:
        """The settings that the variables ask for; absent or empty ones keep their default.

        Raises:
            StartError: for a malformed value, naming the variable.
        """
        return cls(**_read(os.environ))

    def checked(self) -> ServerConfig:
        """This configuration, when every value is within its limits.

        Raises:
            StartError: naming the first that is not.
        """
        for setting in SETTINGS:
            setting.check(getattr(self, setting.field))
        return self

    @property
    def address(self) -> str:
        """Where gunicorn listens, in its own spelling."""
        if self.listen_fd is not None:
            return f"fd://{self.listen_fd}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def max_live(self) -> int:
        """Requests that may run or wait at once."""
        return self.max_sequences + self.max_waiting

    @property
    def threads(self) -> int:
        """Handler threads: one, asleep, for each live request, and some for others."""
        return self.max_live + SPARE_THREADS

    @property
    def max_entered(self) -> int:
        """Chat requests that may hold a thread at once, be they received, waiting or running."""
        return self.threads - _SHORT_THREADS

    @property
    def head_s(self) -> float:
        """Seconds that a request's head may take to arrive."""
        return min(self.body_s, _HEAD_S)

    @property
    def socket_path(self) -> Path:
        """Where the engine process listens."""
        return self._run_dir / SOCKET

    @property
    def status_path(self) -> Path:
        """Where the supervisor writes how its children are."""
        return self._run_dir / STATUS

    @property
    def draining_path(self) -> Path:
        """A file that exists from the moment the server is asked to stop."""
        return self._run_dir / DRAINING

    @property
    def _run_dir(self) -> Path:
        if self.run_dir is None:
            raise StartError("UF_RUN_DIR is not set: start through `python -m ultraflash.server`")
        return self.run_dir

    def with_run_dir(self) -> ServerConfig:
        """This configuration with a private directory for socket and status, new if it has none.

        Raises:
            StartError: when no directory can be made or its path is too long for a socket.
        """
        if self.run_dir is not None:
            return self
        try:
            made = replace(self, run_dir=make_run_dir())
        except OSError as error:
            raise StartError(f"no temporary directory ({error}): set TMPDIR to one") from error
        if len(os.fsencode(made.socket_path)) > _MAX_SOCKET_PATH_BYTES:
            remove_run_dir(made._run_dir)
            raise StartError(
                f"{made.socket_path} is too long for a Unix socket, which takes "
                f"{_MAX_SOCKET_PATH_BYTES} bytes: set TMPDIR to a shorter directory"
            )
        return made

    def variables(self) -> dict[str, str]:
        """The variables from which `from_env` rebuilds this object."""
        values = ((s.name, getattr(self, s.field)) for s in SETTINGS)
        return {name: str(value) for name, value in values if value is not None}

    def export(self) -> None:
        """Set the variables for this process and all that it starts."""
        os.environ.update(self.variables())

    def environment(self) -> dict[str, str]:
        """The environment for a process that shall read this configuration.

        BLAS gets one thread unless the user chose: its threads spin against each other and
        against the HTTP process, and cost several times the work.
        """
        return {"OPENBLAS_NUM_THREADS": "1", **os.environ, **self.variables()}


@dataclass(frozen=True)
class Setting:
    """An environment variable, the field it sets, and how its text is understood."""

    name: str
    field: str
    parse: Callable[[str], Any]
    least: float | None = None

    def read(self, text: str) -> Any:
        """The value of `text`.

        Raises:
            StartError: naming the variable when the text is malformed or out of its range.
        """
        try:
            value = self.parse(text)
        except ValueError as error:
            raise StartError(f"{self.name}={text} is malformed: {error}") from error
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Refuse a number that is too small or not finite.

        Raises:
            StartError: naming the option, the limit and the value.
        """
        if value is None or self.least is None or self.least <= value < float("inf"):
            return
        option = self.field.replace("_s", "_seconds") if self.parse is float else self.field
        finite = "finite and " if self.parse is float else ""
        raise StartError(
            f"{option.replace('_', '-')} ({self.name}) must be {finite}at least {self.least:g}, "
            f"got {value:g}"
        )


SETTINGS = (
    Setting("UF_CHECKPOINT", "checkpoint", lambda text: Path(text).expanduser()),
    Setting("UF_HOST", "host", str),
    Setting("UF_PORT", "port", int, 0),
    Setting("UF_LISTEN_FD", "listen_fd", int, 0),
    Setting("UF_CONTEXT", "context", int, 1),
    Setting("UF_MAX_SEQUENCES", "max_sequences", int, 1),
    Setting("UF_WORLD", "world", int, 1),
    Setting("UF_GPUS", "gpus", str),
    Setting("UF_MAX_WAITING", "max_waiting", int, 0),
    Setting("UF_MAX_WAITING_TOKENS", "max_waiting_tokens", int, 1),
    Setting("UF_DRAIN_SECONDS", "drain_s", float, 0),
    Setting("UF_GRACEFUL_SECONDS", "graceful_s", float, 0),
    Setting("UF_KEEP_ALIVE_SECONDS", "keep_alive_s", float, 0.01),
    Setting("UF_BODY_SECONDS", "body_s", float, 0.01),
    Setting("UF_RUN_DIR", "run_dir", Path),
)


def _read(environment: Mapping[str, str]) -> dict[str, Any]:
    present = ((s, environment.get(s.name, "")) for s in SETTINGS)
    return {s.field: s.read(text) for s, text in present if text}
