"""The clamped gated activation of experts (model.md 4.7)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, fake_q8, silu, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


def swiglu(gate: F32, up: F32, limit: float) -> F32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in float32, not rounded."""
    high = np.float32(limit)
    return silu(np.minimum(gate, high)) * np.clip(up, -high, high)


@dataclass(frozen=True)
class Swiglu(Op):
    """The shared expert's activation, rounded to bf16, then Q8: no routing weight.

    Shapes:
        gate, up, y: [T, F] bf16, F a multiple of 32.
    """

    gate: Ref
    up: Ref
    y: Ref
    limit: float

    @staticmethod
    def reference(gate: F32, up: F32, limit: float) -> F32:
        """float32 inside."""
        return fake_q8(to_bf16(swiglu(gate, up, limit)))

    def geometry(self) -> Geometry:
        """A thread for every two elements."""
        return Geometry(-(-prod(self.y.shape) // 512))
