"""The last row of each sequence: the one behind which a prefill samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class TakeLast(Op):
    """y[s] = x[row_start[s+1] - 1]; a sequence without rows gives some other row.

    Shapes:
        x: [T, ...]; row_start: [S+1] i32; y: [S, ...].
    """

    x: Ref
    row_start: Ref
    y: Ref

    @staticmethod
    def reference(x: F32, row_start: I32) -> F32:
        """A copy; exact."""
        return x[np.maximum(row_start[1:] - 1, 0)]

    def geometry(self) -> Geometry:
        """A CTA a sequence."""
        return Geometry(self.y.shape[0])
