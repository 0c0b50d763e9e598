"""Matrix products: every linear of the model is this one contract (model.md 3.2, architecture.md
4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, F64, round_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class Linear(Op):
    """y = x @ w.T of the exactly dequantised operands, accumulated, rounded once to y's type.

    With `groups` > 1 the input falls into that many equal parts, each with its own rows of `w` (the
    output projection's first half). Partial sums of a split input are f32 and meet in an
    `AllReduce`.

    Shapes:
        x: [T, G*K] bf16 (already through Q8 where w is fp8); w: [N, K] fp8 | bf16 | f32; y: [T, N]
        bf16 | f32.
    """

    x: Ref
    w: Ref
    y: Ref
    groups: int = 1
    rounded: bool = True  # to bf16; otherwise f32

    @staticmethod
    def reference(x: F32, w: F64, groups: int, rounded: bool) -> F32:
        """float64 sums: of operands this short they are exact or nearly so, in any order."""
        wide = x.astype(np.float64)
        if groups == 1:
            total = wide @ w.T
        else:
            parts = wide.reshape(len(x), groups, -1).transpose(1, 0, 2)
            split = w.reshape(groups, -1, w.shape[-1]).transpose(0, 2, 1)
            total = (parts @ split).transpose(1, 0, 2).reshape(len(x), -1)
        return round_bf16(total) if rounded else total.astype(np.float32)

    def geometry(self) -> Geometry:
        """A warp a column."""
        return Geometry(-(-self.w.shape[0] // 4), threads=128)

    def flops(self) -> int:
        """Two a weight and row."""
        return 2 * self.x.shape[0] * prod(self.w.shape)
