"""The activation quantiser in front of FP8 and FP4 linears (model.md 3.1, Q8)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ultraflash.graphs.numerics import F32, fake_q8
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class Quant8(Op):
    """Q8 in groups of 32 along the last axis, as the exact bf16 values code * scale.

    Shapes:
        x, y: [T, ..., K] bf16.
    """

    x: Ref
    y: Ref

    @staticmethod
    def reference(x: F32) -> F32:
        """Bit-exact."""
        return fake_q8(x)

    def geometry(self) -> Geometry:
        """A thread for every two elements."""
        return Geometry(-(-prod(self.x.shape) // 512))
