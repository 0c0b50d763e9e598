"""A step's rows as they follow from each slot's last step: its beginning, without the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32
from ultraflash.graphs.width import Rule, room


@dataclass(frozen=True)
class FollowRows(Op):
    """How many of its drafts each sequence verifies, and the step laid out for them; rows behind
    the last sequence's are idle. All from what `NextRows` kept, where all sequences go on; else
    the step stays as the host wrote it.

    Shapes:
        follows: [S] i32, slots of the sequences that go on, -1 = the host's step; end: [S] i32,
        length at which an answer ends at the latest; ban, ban_end: [S] i32, a token that may not
        come behind rows at positions before ban_end; own, threshold, chance, price as in `Rule`,
        R = T; next_ids: [slots, 1+B] i32; next_at: [slots, 2] i32; next_confidence: [slots, B]
        f32; row_start: [S+1] i32; slot, ids, position, banned: [T] i32; step: [S] i32; kept: [S]
        i32, drafts among the rows. Without drafting B is 0, and what is about drafts is absent.
    """

    OUT: ClassVar[tuple[str, ...]] = ("kept",)
    UPDATES: ClassVar[tuple[str, ...]] = ("row_start", "slot", "ids", "position", "banned", "step")
    follows: Ref
    end: Ref
    ban: Ref
    ban_end: Ref
    own: Ref | None
    threshold: Ref | None
    chance: Ref | None
    price: Ref | None
    next_ids: Ref
    next_at: Ref
    next_confidence: Ref | None
    row_start: Ref
    slot: Ref
    ids: Ref
    position: Ref
    banned: Ref
    step: Ref
    kept: Ref
    low: float  # first knot of the tables of chances
    per_logit: float  # knots in a unit of logits

    @staticmethod
    def reference(
        follows: I32,
        end: I32,
        ban: I32,
        ban_end: I32,
        own: I32 | None,
        threshold: F32 | None,
        chance: F32 | None,
        price: F32 | None,
        next_ids: I32,
        next_at: I32,
        next_confidence: F32 | None,
        row_start: I32,
        slot: I32,
        ids: I32,
        position: I32,
        banned: I32,
        step: I32,
        low: float,
        per_logit: float,
    ) -> I32:
        """Exact, in float32."""
        del low, per_logit  # graphs/width.py has them
        if follows[0] < 0:
            hosts: I32 = np.maximum(np.diff(row_start) - 1, 0).astype(np.int32)
            return hosts
        kept, (start, number) = np.zeros_like(follows), next_at[follows].T
        if next_confidence is not None:
            assert own is not None
            assert threshold is not None
            assert chance is not None
            assert price is not None
            limits = room(start + 1, end, next_confidence.shape[1])
            rule = Rule(chance, threshold, price, own)
            kept = rule.kept(next_confidence[follows], limits, len(ids))
        slot[:], ids[:], position[:], banned[:] = -1, 0, 0, -1
        row_start[:] = np.concatenate([[0], np.cumsum(1 + kept)])
        for s, rows in enumerate((1 + kept).tolist()):
            mine = slice(row_start[s], row_start[s + 1])
            slot[mine], ids[mine] = follows[s], next_ids[follows[s], :rows]
            position[mine] = start[s] + np.arange(rows)
            banned[mine] = np.where(position[mine] < ban_end[s], ban[s], -1)
        step[:] = number
        return kept

    def geometry(self) -> Geometry:
        """One CTA; chances of all drafts and a number a sequence in shared memory."""
        sequences, ids = self.step.shape[0], self.next_ids.shape[1]
        return Geometry(1, threads=128, shared=4 * sequences * (2 * (ids - 1) + 2))

    def state_bytes(self) -> int:
        """A row of each for each sequence."""
        ids, at = self.next_ids.shape[1], self.next_at.shape[1]
        return 4 * self.step.shape[0] * (ids + at + ids - 1)
