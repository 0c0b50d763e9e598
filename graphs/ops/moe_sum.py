"""Routed and shared experts added up (model.md 4.7)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class MoeSum(Op):
    """Experts in increasing number, then the shared one, in f32; rounded to bf16 unless ranks still
    have to add.

    Shapes:
        routed: [T, k, D] bf16 | f32; shared: [T, D] bf16 | f32; y: [T, D] bf16 | f32, D a multiple
        of 4.
    """

    routed: Ref
    shared: Ref
    y: Ref
    rounded: bool

    @staticmethod
    def reference(routed: F32, shared: F32, rounded: bool) -> F32:
        """float32 additions in order."""
        total = routed[:, 0]
        for i in range(1, routed.shape[1]):
            total = total + routed[:, i]
        total = total + shared
        return to_bf16(total) if rounded else total

    def geometry(self) -> Geometry:
        """A thread four neighbours, along y a row."""
        rows, dim = self.y.shape
        return Geometry(-(-dim // 1024), rows)
