"""How many drafts each session verifies, and what every step teaches about that.

Between the engine's sessions and the width rule (runtime/width.py). `adaptive` is the rule of
architecture.md section 5; `fixed` takes the profile's thresholds for every request, not only for
seeded ones; `all` verifies what fits, for comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ultraflash.runtime.plans import Result
from ultraflash.runtime.profiles import Profile
from ultraflash.runtime.session import Session
from ultraflash.runtime.width import Chooser


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

    def choose(self, sessions: Sequence[Session]) -> tuple[int, ...]:
        """Drafts to verify of each session in the next step."""
        limits = [s.room for s in sessions]
        if self._mode == "all" or not any(limits):
            return self._share(limits)
        confidences = np.array([s.confidence for s in sessions], np.float64)
        fixed = [self._mode == "fixed" or s.repeatable for s in sessions]
        return self.chooser.choose(confidences, fixed, limits)

    def learn(
        self, ms: float, confidences: Sequence[Sequence[float]], kept: Sequence[int],
        results: Sequence[Result],
    ) -> None:  # fmt: skip
        """After a step of `ms` milliseconds: times, rate and the worth of confidences."""
        step = len(kept) + sum(kept), len(kept)
        first = step not in self._ran
        self._ran.add(step)
        if first or not all(confidences):
            return  # the first run of a width compiles; plain decoding teaches nothing
        accepted = np.array([r.accepted for r in results], np.int64)
        self.chooser = self.chooser.observed(
            ms, np.array(confidences), np.array(kept, np.int64), accepted, [False] * len(kept)
        )

    def _share(self, limits: Sequence[int]) -> tuple[int, ...]:
        """As many as fit, a row to each in turn."""
        kept, left = [0] * len(limits), self._max_rows - len(limits)
        while left > 0 and (wanting := [i for i, n in enumerate(limits) if kept[i] < n]):
            for i in wanting[:left]:
                kept[i] += 1
            left -= len(wanting)
        return tuple(kept)
