"""How many drafts each session verifies, and what every step teaches about that.

Between the engine's sessions and the width rule (graphs/width.py). `adaptive` is the rule of
architecture.md section 5; `fixed` takes the profile's thresholds for every request, not only for
seeded ones; `all` verifies what fits, for comparisons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ultraflash.graphs.width import Rule
from ultraflash.runtime.plans import Result
from ultraflash.runtime.profiles import Profile
from ultraflash.runtime.session import Session
from ultraflash.runtime.width import Chooser

RECENT = 16  # steps that say how wide the next one may be


class _Heard(NamedTuple):
    """A step of S sequences: its time, confidences [S, B], drafts verified [S] and accepted [S]."""

    ms: float
    confidences: Sequence[Sequence[float]]
    kept: Sequence[int]
    accepted: Sequence[int]


class Widths:
    """The width rule of one engine, with all that it has learnt."""

    def __init__(self, mode: str, profile: Profile, max_rows: int, max_sequences: int) -> None:
        """Start from the machine's profile.

        Raises:
            ConfigError: when a step has fewer rows than sequences.
        """
        self._mode, self._max_rows = mode, max_rows
        self.chooser = Chooser.start(profile, max_rows, max_sequences)
        self._ran: set[tuple[int, int]] = set()
        self._recent: deque[int] = deque(maxlen=RECENT)  # rows of the latest steps
        self._heard: list[_Heard] = []  # not yet learnt from

    def rule(self, sessions: Sequence[Session]) -> Rule:
        """What decides the widths of these sessions' next step."""
        if self._mode == "all":
            return Rule.everything(self.chooser.calibration.block, self._max_rows, len(sessions))
        return self.chooser.rule([self._mode == "fixed" or s.repeatable for s in sessions])

    def rows_ahead(self, sessions: Sequence[Session]) -> int:
        """Rows to have room for in a step whose width the device will choose.

        Idle rows are not free, so that adaptive steps get one more than any of the latest needed: a
        bound that earlier steps alone decide. Seeded requests keep their widths whatever came
        before.
        """
        most = min(self._max_rows, len(sessions) * (1 + self.chooser.calibration.block))
        if self._mode != "adaptive" or any(s.repeatable for s in sessions):
            return most
        return min(most, 1 + max(self._recent, default=most))

    def hear(
        self, ms: float, confidences: Sequence[Sequence[float]], kept: Sequence[int],
        results: Sequence[Result],
    ) -> None:  # fmt: skip
        """A step took `ms` milliseconds, and what came of its drafts. `learn` makes use of it."""
        step = len(kept) + sum(kept), len(kept)
        self._recent.append(step[0])
        first = step not in self._ran
        self._ran.add(step)
        if first or not all(confidences):
            return  # the first run of a width may compile; plain decoding teaches nothing
        self._heard.append(_Heard(ms, confidences, kept, [r.accepted for r in results]))

    def learn(self) -> None:
        """Times, rate and the worth of confidences, from what was heard since.

        It may take as long as a small step, so it is done while the device is busy.
        """
        for ms, confidences, kept, accepted in self._heard:
            self.chooser = self.chooser.observed(
                ms, np.array(confidences), np.array(kept, np.int64), np.array(accepted, np.int64),
                [False] * len(kept),
            )  # fmt: skip
        self._heard.clear()
        self.chooser.rule([])  # its tables are made now, not when a step waits for them
