"""Which backend runs a checkpoint: the GPUs if there are any, else the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ultraflash.graphs.model import Model
from ultraflash.ptx import ARCHITECTURES
from ultraflash.runtime.backend import Backend
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.interpret import NumpyBackend
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend

Progress = Callable[[int, int], None]


def open_backend(
    config: RuntimeConfig,
    index: CheckpointIndex,
    model: Model,
    progress: Progress | None = None,
    *,
    keep_scratch: bool = False,
) -> Backend:
    """Load the weights where `config.backend` says; `auto` takes a GPU if one is there.

    `keep_scratch`: every buffer of a step can be read afterwards.

    Raises:
        EngineError: when the checkpoint, the device or the memory do not allow it.
        WorldError: when the model cannot be split over `config.world` ranks.
    """
    if config.backend == "cuda" or (config.backend == "auto" and num_gpus()):
        return _open_cuda(config, index, model, progress, keep_scratch)
    weights = load_weights(
        index, model, config.world, progress=progress, cache_dir=config.cache_dir
    )
    return NumpyBackend(weights, config.world, config.check)


def num_gpus() -> int:
    """GPUs that our kernels run on; 0 without a driver, or without the extra that talks to it."""
    try:
        from ultraflash.runtime.gpu.driver import architecture, device_count
    except ImportError:
        return 0
    return sum(architecture(ordinal) in ARCHITECTURES for ordinal in range(device_count()))


def cuda_backend() -> type[CudaBackend]:
    """The class that drives one GPU; importing it here keeps the bindings optional.

    Raises:
        ConfigError: when the extra that talks to the driver and the compiler is not installed.
    """
    try:
        from ultraflash.runtime.gpu.backend import CudaBackend
    except ImportError as error:
        raise ConfigError(
            f"running on a GPU needs the CUDA bindings ({error}): pip install 'ultraflash[cuda]'"
        ) from error
    return CudaBackend


def _open_cuda(
    config: RuntimeConfig,
    index: CheckpointIndex,
    model: Model,
    progress: Progress | None,
    keep_scratch: bool,
) -> Backend:
    named = ",".join(map(str, config.gpus)) or "none"
    if config.world != len(config.gpus):
        raise ConfigError(
            f"world {config.world} takes as many GPUs, and {len(config.gpus)} are named ({named}): "
            f"name one for each rank with --gpus, or set UF_BACKEND=numpy"
        )
    if len(set(config.gpus)) < len(config.gpus):
        raise ConfigError(f"every rank needs a GPU of its own, and --gpus names one twice: {named}")
    model.check_world(config.world)
    one = cuda_backend()
    if config.world == 1:
        return one.open(config, index, model, progress, keep_scratch=keep_scratch)
    from ultraflash.runtime.gpu.group import GroupBackend

    return GroupBackend.open(config, index, model, progress, keep_scratch=keep_scratch)
