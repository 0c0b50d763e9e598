"""State of the full-size model without its weights: enough to copy out and back."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from helpers.device import REHEARSAL
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Life, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Backend
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.weights.device import DeviceWeights

SLOTS, MAX_SEQ = 2, 131_072


@cache
def full_size_refs() -> tuple[Ref, ...]:
    """State buffers of the released model, for a short context."""
    model = release_model()
    build = Build(model, Capacity(SLOTS, MAX_SEQ), block=model.draft_block)
    return tuple(build_decode(build, 1, 1).of_life(Life.STATE))


def full_size_layout() -> Layout:
    return Layout.of(release_model(), full_size_refs())


def full_size_backend(beside: Any) -> Backend:
    """A backend that holds that state and no weights, its copies queued among the steps of
    `beside`.
    """
    made: Any
    if REHEARSAL:
        from ultraflash.runtime.interpret import NumpyBackend

        made = NumpyBackend(beside.weights)
        for ref in full_size_refs():
            made.state(ref, 0)
        return made
    from ultraflash.runtime.gpu.backend import CudaBackend

    made = CudaBackend(beside.device, DeviceWeights({}), RuntimeConfig.from_env().cache_dir)
    made.stream = beside.stream
    for ref in full_size_refs():
        made.state(ref)
    return made


def random_bytes(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)
