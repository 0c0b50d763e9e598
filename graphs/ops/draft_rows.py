"""Where the draft stages stand: one block of rows behind each sequence's last accepted row
(model.md 6.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class DraftRows(Op):
    """Rows [anchor, noise, noise, ...] of every sequence at the positions after its last accepted
    row.

    Sequences without rows in this step get idle rows.

    Shapes:
        token: [S] i32, the anchor; accepted: [S] i32; slot, position: [T] i32; row_start: [S+1]
        i32; ids, at, at_slot, text: [S*B] i32 (text: all zero, the image flag of draft rows).
    """

    OUT: ClassVar[tuple[str, ...]] = ("ids", "at", "at_slot", "text")
    token: Ref
    accepted: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    ids: Ref
    at: Ref
    at_slot: Ref
    text: Ref
    block: int
    noise: int

    @staticmethod
    def reference(
        token: I32,
        accepted: I32,
        slot: I32,
        position: I32,
        row_start: I32,
        block: int,
        noise: int,
    ) -> tuple[I32, I32, I32, I32]:
        """Exact."""
        first, busy = row_start[:-1], np.diff(row_start) > 0
        first = np.where(busy, first, 0)
        ids = np.full((len(token), block), noise, np.int32)
        ids[:, 0] = token
        anchor_at = np.where(busy, position[first] + accepted + 1, 0)
        at = anchor_at[:, None] + np.arange(block)
        at_slot = np.repeat(np.where(busy, slot[first], -1), block)
        return (
            ids.reshape(-1),
            at.reshape(-1).astype(np.int32),
            at_slot,
            np.zeros(ids.size, np.int32),
        )

    def geometry(self) -> Geometry:
        """A CTA a sequence."""
        return Geometry(self.token.shape[0], threads=32)
