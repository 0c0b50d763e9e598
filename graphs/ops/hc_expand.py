"""A sub-layer's result goes back into the residual streams (model.md 4.2, `Expand`)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class HcExpand(Op):
    """x'_j = bf16(post_j * y + sum_i comb_ij x_i): the sum runs over the first index of comb.

    Shapes:
        out: [T, D] bf16, the sub-layer's result; x, y: [T, C, D] bf16; post: [T, C] f32; comb: [T,
        C, C] f32.
    """

    out: Ref
    x: Ref
    post: Ref
    comb: Ref
    y: Ref

    @staticmethod
    def reference(out: F32, x: F32, post: F32, comb: F32) -> F32:
        """float32, copies in order."""
        total = comb[:, 0, :, None] * x[:, 0, None, :]
        for i in range(1, x.shape[1]):
            total = total + comb[:, i, :, None] * x[:, i, None, :]
        return to_bf16(post[:, :, None] * out[:, None, :] + total)

    def geometry(self) -> Geometry:
        """Rows, and a thread for every two elements of one."""
        return Geometry(self.x.shape[0], -(-self.x.shape[-1] // 512))
