"""Where each sequence's last row stands: the step that follows a prefill's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class LastIo(Op):
    """What io says of the last row of each sequence, laid out as a step of one row a sequence.

    Sequences without rows have none here either.

    Shapes:
        ids, slot, position: [T] i32; row_start: [S+1] i32; last_ids, last_slot, last_position: [S]
        i32; last_start: [S+1] i32.
    """

    OUT: ClassVar[tuple[str, ...]] = ("last_ids", "last_slot", "last_position", "last_start")
    ids: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    last_ids: Ref
    last_slot: Ref
    last_position: Ref
    last_start: Ref

    @staticmethod
    def reference(ids: I32, slot: I32, position: I32, row_start: I32) -> tuple[I32, I32, I32, I32]:
        """Exact. Rows are given to sequences from the front, so the busy ones come first."""
        last, busy = np.maximum(row_start[1:] - 1, 0), np.diff(row_start) > 0
        start = np.concatenate([[0], np.cumsum(busy)]).astype(np.int32)
        return ids[last], np.where(busy, slot[last], -1).astype(np.int32), position[last], start

    def geometry(self) -> Geometry:
        """One thread."""
        return Geometry(1, threads=1)
