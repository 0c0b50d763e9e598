"""Speculative engines that are wrong on purpose: the statistics must find each of them out."""

from __future__ import annotations

import numpy as np

from helpers.speculation import Speculation
from ultraflash.graphs.numerics import F64
from ultraflash.graphs.philox import U64, Purpose, uniform
from ultraflash.graphs.rows import I32


class PositionKeys(Speculation):
    """Random numbers keyed by position alone. Block verification has looked at the numbers of
    positions that it then rejects; the next step meets them again."""

    def numbers(self, seeds: U64, position: I32, step: I32, purpose: Purpose) -> F64:
        return uniform(seeds, position, np.zeros_like(step), Purpose.RESIDUAL)

    def verify_numbers(self, seeds: U64, first: I32, step: I32, m: int) -> tuple[F64, F64]:
        places = [first + np.int32(i) for i in range(m + 1)]
        all_of_them = [self.numbers(seeds, at, step, Purpose.RESIDUAL) for at in places]
        return np.stack(all_of_them[:m], axis=1), np.stack(all_of_them, axis=1)


class PositionPurposeKeys(Speculation):
    """Keyed by position and purpose, the step left out: subtler, wrong for the same reason."""

    def step_number(self, number: int) -> int:
        return 0


class SharedFirstStep(Speculation):
    """The first decode step has the prefill's number: its new drafts reuse the numbers of the
    drafts that it has just verified."""

    def step_number(self, number: int) -> int:
        return number - 1


class ArgmaxWidth(Speculation):
    """The width with the best expected speed over all confidences: whether a draft stays depends
    on the confidence behind it, and so on the draft."""

    def keep(self, before: I32) -> I32:
        survivals = self.survivals(before)
        tokens = 1 + np.concatenate([np.zeros((len(before), 1)), np.cumsum(survivals, 1)], 1)
        best: I32 = (tokens / self.times_ms[: tokens.shape[1]]).argmax(axis=1).astype(np.int32)
        return best


class ShortenedBlock(Speculation):
    """A draft that the mask forbids ends the block before it, instead of being rejected."""

    def keep(self, before: I32) -> I32:
        allowed = self.toy.allowed[before[:, :-1], before[:, 1:]]
        legal = np.logical_and.accumulate(allowed, axis=1).sum(axis=1)
        kept: I32 = np.minimum(super().keep(before), legal).astype(np.int32)
        return kept
