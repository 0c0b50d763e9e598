"""The drafting input that a target layer contributes (model.md 4.1, 6.1, `tap`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class StreamMean(Op):
    """The mean of a row's residual copies, set behind the means of earlier target layers.

    Shapes:
        x: [T, C, D] bf16; before: [T, n*D] bf16 or absent; y: [T, (n+1)*D] bf16.
    """

    x: Ref
    before: Ref | None
    y: Ref

    @staticmethod
    def reference(x: F32, before: F32 | None) -> F32:
        """float32 sum of the copies in order, one division, rounded to bf16."""
        total = x[:, 0]
        for i in range(1, x.shape[1]):
            total = total + x[:, i]
        mean = to_bf16(total / np.float32(x.shape[1]))
        return mean if before is None else np.concatenate([before, mean], axis=1)

    def geometry(self) -> Geometry:
        """Rows, and a thread for every two elements of one."""
        return Geometry(self.y.shape[0], -(-self.y.shape[-1] // 512))
