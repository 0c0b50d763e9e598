"""The sum over ranks (architecture.md section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from ultraflash.graphs.exchange import PIECE, spread
from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class AllReduce(Op):
    """Every rank gets the sum of all ranks' fp32 partial sums, added in rank order: the same bits
    everywhere.

    Shapes:
        x: [T, ...] f32 of each rank; y: the same, bf16 if `rounded`, else f32.
    """

    COLLECTIVE: ClassVar[bool] = True
    x: Ref
    y: Ref
    rounded: bool

    @staticmethod
    def reference(x: list[F32], rounded: bool) -> F32:
        """float32 additions, rank 0 first."""
        total = x[0]
        for part in x[1:]:
            total = total + part
        return to_bf16(total) if rounded else total

    def geometry(self) -> Geometry:
        """By the message, not by rows."""
        return spread(self.x)

    @property
    def sliced(self) -> bool:
        """Each rank adds up a slice for all: two latencies, a fraction of the words."""
        return prod(self.x.shape) > PIECE

    def variant(self) -> dict[str, int]:
        """Which of the two ways."""
        return {"SLICED": int(self.sliced)}
