"""The exceptions of this room.

GraphError
├── ConfigError    a model configuration that is incomplete or contradicts itself
├── WorldError     a number of ranks that does not divide the model
└── PlanError      a plan whose nodes and buffers do not fit together
"""


class GraphError(Exception):
    """Base of everything that `ultraflash.graphs` raises on purpose."""


class ConfigError(GraphError):
    """The configuration lacks a key or holds values that cannot work together."""


class WorldError(GraphError):
    """The model cannot be split over this number of ranks."""


class PlanError(GraphError):
    """A plan reads what nobody wrote, writes twice, or names a buffer with two shapes."""
