"""What a confidence is worth: an online table from raw confidences to observed acceptance.

The confidence head gives a logit c_i for each draft position; sigmoid(c_i) was trained to be the
chance that draft i is accepted given that all earlier ones were. Here the logit is shifted by what
this server observed: per position and bin of the logit, accepted and rejected drafts are counted,
old counts fade, and a prior that believes the head fills bins with little data. The shift is
interpolated between bins and constant beyond them, and the whole map is nondecreasing. Without
observations it is the identity.

Only the adaptive width rule may use it. The fixed rule of seeded requests takes the raw
confidences, since a table that learns from neighbours would keep a seed from repeating.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.width import KNOTS as RULE_KNOTS
from ultraflash.runtime.errors import ConfigError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

VERSION = 1
BINS = 20
KNOTS: F64 = np.linspace(-4.5, 5.0, BINS)  # centres of the bins, logits; the outer two are open
_WIDTH = float(KNOTS[1] - KNOTS[0])
PRIOR = 12.0  # drafts that the head's own word counts for in each bin
MEMORY = 4096.0  # drafts of a position after which a count has faded to 1/e
_ROWS = ("raw", "accepted", "drafts")


def sigmoid(x: F64) -> F64:
    """1 / (1 + e^-x) without overflow."""
    y: F64 = np.exp(-np.logaddexp(0, -x))
    return y


@dataclass(frozen=True, eq=False)
class Calibration:
    """The table. Immutable: `observed` gives the next one.

    Shapes: `counts` [3, B, BINS]: sum of raw confidences, accepted drafts, drafts; faded.
    """

    counts: F64

    @classmethod
    def start(cls, block: int) -> Calibration:
        """A table that has seen nothing, for `block` draft positions."""
        return cls(np.zeros((len(_ROWS), block, BINS)))

    @property
    def block(self) -> int:
        """Draft positions B."""
        return int(self.counts.shape[1])

    def apply(self, confidences: F64) -> F64:
        """Calibrated chances of confidence logits c_0 .. c_(n-1), n <= B. [..., n] -> [..., n]."""
        shifted = [
            c + np.interp(c, KNOTS, shift)
            for c, shift in zip(np.moveaxis(confidences, -1, 0), self._shift, strict=False)
        ]
        return sigmoid(np.stack(shifted, axis=-1)) if shifted else np.zeros(confidences.shape)

    @cached_property
    def chance(self) -> F32:
        """For the width rule (graphs/width.py): sigmoids at its knots, then calibrated chances.
        [2, B, knots].
        """
        learnt = self.apply(np.repeat(RULE_KNOTS[:, None], self.block, axis=1)).T
        raw = np.broadcast_to(sigmoid(RULE_KNOTS), learnt.shape)
        return np.stack([raw, learnt]).astype(np.float32)

    def observed(self, confidences: F64, kept: I64, accepted: I64) -> Calibration:
        """The table after some steps: what verification said of each sequence's drafts.

        The outcome of draft i is known when it was verified (i < kept) and all before it were
        accepted (i <= accepted). Pass the counts of the verification itself, before a stop token
        or a length limit cuts the answer, and leave out sequences under a token mask: their
        rejections say nothing about the head.

        Shapes: confidences: [S, B] logits; kept, accepted: [S].
        """
        place = np.arange(self.block)
        known = (place < kept[:, None]) & (place <= accepted[:, None])
        sequence, position = np.nonzero(known)
        if not len(sequence):
            return self
        logits = confidences[sequence, position]
        bins = np.clip(np.rint((logits - KNOTS[0]) / _WIDTH), 0, BINS - 1).astype(np.int64)
        counts = self.counts * np.exp(-known.sum(axis=0) / MEMORY)[:, None]
        passed = (position < accepted[sequence]).astype(np.float64)
        for row, value in enumerate((sigmoid(logits), passed, np.ones(len(logits)))):
            np.add.at(counts[row], (position, bins), value)
        return Calibration(counts)

    def to_plain(self) -> dict[str, Any]:
        """Numbers and lists only, for a JSON file."""
        return {
            "version": VERSION,
            "block": self.block,
            "knots": KNOTS.tolist(),
            "counts": {name: self.counts[i].tolist() for i, name in enumerate(_ROWS)},
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any], block: int) -> Calibration:
        """The table that `to_plain` wrote.

        Raises:
            ConfigError: when it was made for another block, by another version, or is damaged.
        """
        made = (data.get("version"), data.get("block"), data.get("knots"))
        if made != (VERSION, block, KNOTS.tolist()):
            raise ConfigError(
                f"calibration of version {made[0]} for block {made[1]} does not fit version "
                f"{VERSION} and block {block}: delete it, the server learns a new one"
            )
        shape = (len(_ROWS), block, BINS)
        try:
            counts = np.array([data["counts"][name] for name in _ROWS], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(str(error)) from error
        if counts.shape != shape:
            raise _damaged(f"shape {counts.shape} instead of {shape}")
        raw, accepted, drafts = counts
        sound = (counts >= 0) & np.isfinite(counts)
        # A sum of confidences and a count of successes both stay below the number of drafts.
        if not (sound.all() and (np.maximum(raw, accepted) <= drafts * (1 + 1e-9)).all()):
            raise _damaged("counts are negative, not finite or larger than the drafts")
        return cls(counts)

    @cached_property
    def _shift(self) -> F64:
        """What to add to a logit at each knot. [B, BINS]."""
        raw, accepted, drafts = self.counts
        belief = PRIOR * sigmoid(KNOTS)
        weight = drafts + PRIOR
        said, happened = (raw + belief) / weight, (accepted + belief) / weight
        value = KNOTS + _logit(happened) - _logit(said)
        return _nondecreasing(value, weight) - KNOTS


def _nondecreasing(value: F64, weight: F64) -> F64:
    """Weighted least-squares nondecreasing fit of each row, by the max-min formula. [P, N]."""
    n = value.shape[1]
    start, end = np.arange(n)[:, None], np.arange(n)[None, :]

    def sums(x: F64) -> F64:
        total = np.concatenate([np.zeros((len(x), 1)), np.cumsum(x, axis=1)], axis=1)
        part: F64 = total[:, None, 1:] - total[:, :-1, None]  # [P, start, end]
        return part

    inside = start <= end
    mean = np.where(inside, sums(value * weight) / np.where(inside, sums(weight), 1), np.inf)
    least = np.minimum.accumulate(mean[:, :, ::-1], axis=2)[:, :, ::-1]  # over ends >= column
    fit: F64 = np.where(inside, least, -np.inf).max(axis=1)
    return fit


def _logit(p: F64) -> F64:
    y: F64 = np.log(p) - np.log1p(-p)
    return y


def _damaged(reason: str) -> ConfigError:
    return ConfigError(f"calibration is damaged ({reason}): delete it, the server learns a new one")
