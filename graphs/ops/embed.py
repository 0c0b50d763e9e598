"""Token embedding, copied into the residual streams (model.md 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class Embed(Op):
    """Every copy of a row's stream starts as its token's embedding; the first collapse takes copy 0
    alone.

    Shapes:
        ids: [T] i32; table: [V, D] bf16; x: [T, C, D] bf16; pre: [T, C] f32 = (1, 0, 0, 0).
    """

    OUT: ClassVar[tuple[str, ...]] = ("x", "pre")
    ids: Ref
    table: Ref
    x: Ref
    pre: Ref
    copies: int

    @staticmethod
    def reference(ids: I32, table: F32, copies: int) -> tuple[F32, F32]:
        """Gather and repeat; exact."""
        x = np.repeat(table[ids][:, None, :], copies, axis=1)
        pre = np.zeros((len(ids), copies), np.float32)
        pre[:, 0] = 1
        return x, pre

    def geometry(self) -> Geometry:
        """Rows, and a thread for every two elements of one."""
        return Geometry(self.x.shape[0], -(-self.x.shape[-1] // 512))

    def cost(self) -> Cost:
        """Only the gathered rows are read."""
        return Cost(self.x.nbytes // self.copies + self.x.nbytes + self.pre.nbytes, 0)
