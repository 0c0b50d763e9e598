"""How a step runs: tokens in, tokens out. Knows no text and no HTTP.

The door of this room: `Engine.open(config)`, `submit`, `step`. Backends, weights and plans stay
behind it.
"""

from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.engine import Engine
from ultraflash.runtime.errors import (
    ConfigError,
    DeviceError,
    EngineError,
    RequestError,
    WeightsError,
)
from ultraflash.runtime.request import Generation, Sampling, Step

__all__ = [
    "ConfigError",
    "DeviceError",
    "Engine",
    "EngineError",
    "Generation",
    "RequestError",
    "RuntimeConfig",
    "Sampling",
    "Step",
    "WeightsError",
]
