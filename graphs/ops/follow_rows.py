"""A step's rows as they follow from each slot's last step: its beginning, without the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class FollowRows(Op):
    """Ids, positions and step number of sequences that go on come from what `NextRows` kept; of the
    others they stay as the host wrote them, as do rows of a sequence behind its first 1 + B.

    Shapes:
        follows: [S] i32, 1 = goes on; row_start: [S+1] i32; slot: [T] i32; next_ids: [slots, 1+B]
        i32; next_at: [slots, 2] i32; ids, position: [T] i32; step: [S] i32.
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("ids", "position", "step")
    follows: Ref
    row_start: Ref
    slot: Ref
    next_ids: Ref
    next_at: Ref
    ids: Ref
    position: Ref
    step: Ref

    @staticmethod
    def reference(
        follows: I32,
        row_start: I32,
        slot: I32,
        next_ids: I32,
        next_at: I32,
        ids: I32,
        position: I32,
        step: I32,
    ) -> None:
        """Exact."""
        for s in np.flatnonzero((follows != 0) & (np.diff(row_start) > 0)).tolist():
            own = slice(row_start[s], row_start[s + 1])
            kept, (start, number) = next_ids[slot[own.start]], next_at[slot[own.start]]
            count = min(own.stop - own.start, len(kept))
            ids[own][:count] = kept[:count]
            position[own][:count] = start + np.arange(count)
            step[s] = number

    def geometry(self) -> Geometry:
        """A CTA a sequence."""
        return Geometry(self.step.shape[0], threads=32)

    def state_bytes(self) -> int:
        """A row of both for each sequence."""
        return 4 * self.step.shape[0] * (self.next_ids.shape[1] + self.next_at.shape[1])
