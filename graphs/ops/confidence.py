"""How likely a draft is to be accepted, given that the earlier ones are (model.md 6.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32, F64
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref


@dataclass(frozen=True)
class Confidence(Op):
    """Column `index` of y = [h ; me] . w, before the sigmoid; h is not normed.

    Shapes:
        h: [S*B, D] bf16; me: [S, r] bf16; w: [1, D+r] bf16; y: [S, B] f32.
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("y",)
    h: Ref
    me: Ref
    w: Ref
    y: Ref
    index: int

    @staticmethod
    def reference(h: F32, me: F32, w: F64, y: F32, index: int) -> None:
        """float64 sums, rounded to float32 once."""
        block = len(h) // len(me)
        both = np.concatenate([h[index::block], me], axis=1).astype(np.float64)
        y[:, index] = (both @ w[0]).astype(np.float32)

    def geometry(self) -> Geometry:
        """A CTA a sequence."""
        return Geometry(self.me.shape[0])

    def cost(self) -> Cost:
        """One draft of each sequence, and the head's weights."""
        values = self.y.shape[0] * self.w.shape[1]
        return Cost(2 * values + 4 * self.y.shape[0] + self.w.nbytes, 2 * values)
