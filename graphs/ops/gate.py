"""Which experts serve a row, and with what weight (model.md 4.7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


def route(
    logits: F32, bias: F32, bias_image: F32, is_image: I32, k: int, scale: float
) -> tuple[I32, F32]:
    """Experts of each row, ascending, and their weights. [T, N] -> [T, k], [T, k]."""
    softplus = np.where(logits > 20, logits, np.log1p(np.exp(np.minimum(logits, np.float32(20)))))
    score = np.sqrt(softplus)
    biased = score + np.where(is_image[:, None] > 0, bias_image, bias)
    # Stable: equal scores go to the lower expert.
    ids = np.sort(np.argsort(-biased, axis=1, kind="stable")[:, :k], axis=1)
    weight = np.take_along_axis(score, ids, axis=1)
    if k > 1:
        total = weight[:, :1]
        for i in range(1, k):
            total = total + weight[:, i : i + 1]
        weight = weight / (total + np.float32(1e-20))
    return ids.astype(np.int32), weight * np.float32(scale)


_MOST = 512  # experts; ptx/gate.cu has the same


@dataclass(frozen=True)
class Gate(Op):
    """Top-k of sqrt(softplus(logits)) + bias; weights from the unbiased scores, renormalised, times
    the route scale.

    Image rows use their own bias. The logits are a `Linear` in f32. Idle rows go where row 0 goes,
    so that no expert is read for them alone.

    Shapes:
        logits: [T, N] f32; bias, bias_image: [N] f32; is_image, slot: [T] i32; ids: [T, k] i32
        ascending; weight: [T, k] f32.
    """

    OUT: ClassVar[tuple[str, ...]] = ("ids", "weight")
    logits: Ref
    bias: Ref
    bias_image: Ref
    is_image: Ref
    slot: Ref
    ids: Ref
    weight: Ref
    k: int
    scale: float

    @staticmethod
    def reference(
        logits: F32,
        bias: F32,
        bias_image: F32,
        is_image: I32,
        slot: I32,
        k: int,
        scale: float,
    ) -> tuple[I32, F32]:
        """float32 throughout."""
        row = np.where(slot < 0, 0, np.arange(len(slot)))
        return route(logits[row], bias, bias_image, is_image[row], k, scale)

    def geometry(self) -> Geometry:
        """A CTA a row; two values an expert and one a choice in shared memory."""
        rows, experts = self.logits.shape
        assert experts <= _MOST, f"{self.logits} has more experts than a warp keeps in registers"
        return Geometry(rows, threads=128, shared=8 * experts + 4 * self.k)
