"""All ranks' columns (architecture.md section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.exchange import spread
from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class AllGather(Op):
    """Every rank gets all ranks' columns side by side, rank 0 first.

    Shapes:
        x: [T, N] f32 of each rank; y: [T, world*N] f32.
    """

    COLLECTIVE: ClassVar[bool] = True
    x: Ref
    y: Ref

    @staticmethod
    def reference(x: list[F32]) -> F32:
        """Exact."""
        return np.concatenate(x, axis=-1)

    def geometry(self) -> Geometry:
        """By the message, not by rows."""
        return spread(self.x)
