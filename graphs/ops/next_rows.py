"""What a slot's next step begins with, kept on the device: the end of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class NextRows(Op):
    """Ids of the rows that may come next, the position of the first of them, the next step's
    number, confidences of the drafts. Slots without rows in this step keep what they have.

    A function of this step alone, so that nothing of it belongs to a snapshot: the prefill that
    follows a restore writes it anew.

    Shapes:
        token, accepted, step: [S] i32; drafts, confidence: [S, B] i32 and f32, or absent; slot,
        position: [T] i32; row_start: [S+1] i32; next_ids: [slots, 1+B] i32, the token sampled last,
        then drafts; next_at: [slots, 2] i32, position and step; next_confidence: [slots, B] f32 or
        absent.
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("next_ids", "next_at", "next_confidence")
    token: Ref
    accepted: Ref
    drafts: Ref | None
    confidence: Ref | None
    slot: Ref
    position: Ref
    row_start: Ref
    step: Ref
    next_ids: Ref
    next_at: Ref
    next_confidence: Ref | None

    @staticmethod
    def reference(
        token: I32,
        accepted: I32,
        drafts: I32 | None,
        confidence: F32 | None,
        slot: I32,
        position: I32,
        row_start: I32,
        step: I32,
        next_ids: I32,
        next_at: I32,
        next_confidence: F32 | None,
    ) -> None:
        """Exact."""
        busy = np.flatnonzero(np.diff(row_start) > 0)
        first = row_start[busy]
        own = slot[first]
        next_ids[own, 0] = token[busy]
        if drafts is not None:
            next_ids[own, 1:] = drafts[busy]
        if next_confidence is not None:
            assert confidence is not None
            next_confidence[own] = confidence[busy]
        next_at[own, 0] = position[first] + accepted[busy] + 1
        next_at[own, 1] = step[busy] + 1

    def geometry(self) -> Geometry:
        """A CTA a sequence."""
        return Geometry(self.token.shape[0], threads=32)

    def state_bytes(self) -> int:
        """A row of each for each sequence."""
        ids, at = self.next_ids.shape[1], self.next_at.shape[1]
        return 4 * self.token.shape[0] * (ids + at + ids - 1)
