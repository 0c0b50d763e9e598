"""How many drafts a step verifies: the stopping rule of architecture.md section 5.

A stopping rule, never an argmax. The survival S_i of draft i (counted from 1) is a product over
confidences c_0 .. c_(i-1), none of which depends on draft i itself; whether draft i stays is
decided by S_1 .. S_i alone. Choosing the best width afterwards would condition the text on the
drafts, and the answer would no longer be the target's.

The device applies it at the beginning of a step (ops/follow_rows.py), the host where it writes a
step itself: both take the steps below one by one in float32, so that they agree to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.rows import I32

LOW, PER_LOGIT = -8.0, 4.0  # first knot of a table of chances, knots in a unit of logits
KNOTS = np.arange(65) / PER_LOGIT + LOW  # -8 .. 8; constant beyond
COMPETES = -1  # `Rule.own` of a sequence without rows of its own


class Rule(NamedTuple):
    """The numbers of the rule. For a block of B drafts, S sequences, steps of up to R rows.

    A sequence with rows of its own keeps up to so many drafts whatever its neighbours do, the
    fixed rule's: it knows neither clock nor history, so that a seed repeats. The others compete
    for what is left, the largest survival first, while it is worth its row.

    Shapes: chance: [2, B, K] f32, what a confidence at each knot is worth, by the fixed rule and to
    those who compete; threshold: [B] f32, survivals that the fixed rule wants; price: [R] f32, the
    survival that a row must exceed when so many stand before it; own: [S] i32 or `COMPETES`.
    """

    chance: F32
    threshold: F32
    price: F32
    own: I32

    @classmethod
    def everything(cls, block: int, rows: int, sequences: int) -> Rule:
        """All drafts for which steps of `rows` rows have room, a row to each in turn."""
        return cls(
            np.ones((2, block, len(KNOTS)), np.float32),
            np.zeros(block, np.float32),
            np.zeros(rows, np.float32),
            np.full(sequences, COMPETES, np.int32),
        )

    def kept(self, confidence: F32, limits: I32, rows: int) -> I32:
        """Drafts that a step of `rows` rows verifies of each sequence, one row each being taken.

        confidence: [S, B] logits; limits: [S], drafts that there is room for; result: [S].
        """
        fixed = keep_fixed(survival(confidence, self.chance[0]), self.threshold)
        return self.shared(fixed, survival(confidence, self.chance[1]), limits, rows)

    def shared(self, fixed: I32, worth: F32, limits: I32, rows: int) -> I32:
        """The same from what the fixed rule keeps [S] and what survives of others [S, B]."""
        kept, left = np.zeros(len(limits), np.int32), rows - len(limits)
        for s in np.flatnonzero(self.own >= 0):
            kept[s] = min(fixed[s], self.own[s], limits[s], left)
            left -= kept[s]
        while left > 0 and (best := self._next(worth, kept, limits)) is not None:
            if not worth[best, kept[best]] >= self.price[rows - left]:
                break
            kept[best] += 1
            left -= 1
        return kept

    def _next(self, worth: F32, kept: I32, limits: I32) -> int | None:
        """The sequence whose next draft survives most likely; among equals the one with fewest."""
        rivals = [s for s in np.flatnonzero(self.own < 0).tolist() if kept[s] < limits[s]]
        return max(rivals, key=lambda s: (worth[s, kept[s]], -kept[s]), default=None)


def chances(confidence: F32, table: F32) -> F32:
    """What confidences are worth, linear between knots. [..., B] logits, [B, K] -> [..., B]."""
    last = len(KNOTS) - 1
    scaled = (confidence - np.float32(LOW)) * np.float32(PER_LOGIT)
    at = np.fmin(np.fmax(scaled, np.float32(0)), np.float32(last))
    knot = np.minimum(at.astype(np.int64), last - 1)
    place = np.arange(len(table))
    below, above = table[place, knot], table[place, knot + 1]
    y: F32 = below + (at - knot.astype(np.float32)) * (above - below)
    return y


def survival(confidence: F32, table: F32) -> F32:
    """Chance that a draft and all before it are accepted. [..., B], [B, K] -> [..., B]."""
    product: F32 = np.multiply.accumulate(chances(confidence, table), axis=-1)
    return product


def keep_fixed(survivals: F32, wanted: F32) -> I32:
    """Drafts before the first one that survives less likely than wanted. [..., B], [B] -> [...]."""
    count: I32 = np.logical_and.accumulate(survivals >= wanted, axis=-1).sum(-1, dtype=np.int32)
    return count


def room(length: I32 | int, end: I32 | int, block: int) -> I32:
    """Drafts that could still become tokens, one more coming behind them, of answers that have
    `length` tokens, prompt included, and end with `end`. [S], [S] -> [S].
    """
    left: I32 = np.clip(np.asarray(end) - length - 1, 0, block).astype(np.int32)
    return left
