"""The one vector that a sub-layer sees of the residual streams (model.md 4.2, `Collapse`)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


def weighted_copies(weights: F32, x: F32) -> F32:
    """sum_i weights[..., i] * x[..., i, :] in float32, in increasing i."""
    total = weights[..., 0, None] * x[..., 0, :]
    for i in range(1, x.shape[-2]):
        total = total + weights[..., i, None] * x[..., i, :]
    return total


@dataclass(frozen=True)
class HcCollapse(Op):
    """y = bf16(sum over copies of pre * x).

    Shapes:
        x: [T, C, D] bf16; pre: [T, C] f32; y: [T, D] bf16.
    """

    x: Ref
    pre: Ref
    y: Ref

    @staticmethod
    def reference(x: F32, pre: F32) -> F32:
        """float32, copies in order."""
        return to_bf16(weighted_copies(pre, x))

    def geometry(self) -> Geometry:
        """Rows, and a thread for every two elements of one."""
        return Geometry(self.x.shape[0], -(-self.x.shape[-1] // 512))
