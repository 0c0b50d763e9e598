"""Compressed token ids, the alphabet of the n-gram hashes (model.md 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32, I64

DEAD = -1  # an image position: it ends every n-gram that reaches back to it


@dataclass(frozen=True)
class EngramIds(Op):
    """Compressed id of each row, DEAD inside images.

    Shapes:
        ids, is_image: [T] i32; token_map: [V] i64; y: [T] i32.
    """

    ids: Ref
    is_image: Ref
    token_map: Ref
    y: Ref

    @staticmethod
    def reference(ids: I32, is_image: I32, token_map: I64) -> I32:
        """Exact."""
        return np.where(is_image > 0, DEAD, token_map[ids]).astype(np.int32)

    def geometry(self) -> Geometry:
        """A thread a row."""
        return Geometry(-(-self.ids.shape[0] // 128), threads=128)

    def cost(self) -> Cost:
        """Only the rows' own entries of the map are read."""
        return Cost(self.ids.shape[0] * (4 + 4 + 8 + 4), 0)
