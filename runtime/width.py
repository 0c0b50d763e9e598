"""The numbers of the width rule (graphs/width.py), and how they are learnt.

    adaptive   keep while S_i >= (T(rows + 1) - T(rows)) * current rate, T the lower convex hull of
               measured step times. On a hull each row costs at least as much as the one before, and
               survivals fall, so that the first failure is also the optimum.
    fixed      keep while S_i >= threshold_i of the machine's profile, S_i from raw confidences. It
               knows neither clock nor neighbours nor history: a seed repeats.

The numbers that the adaptive rule uses besides confidences (times, rate, calibration) come from
earlier steps only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.width import COMPETES, Rule
from ultraflash.runtime.calibration import Calibration
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.profiles import Profile

T = TypeVar("T")
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

SAMPLES = 15  # newest times of a width, of which the median counts: outlasts 7 disturbed steps
SMOOTHING = 0.25  # weight of a new median
LESSONS = 8  # steps of which the calibration learns at once: it costs the host more than the rest
RATE_STEPS = 32  # steps after which a step's weight in the rate has faded to 1/e


def seeded_drafts(max_rows: int, max_sequences: int) -> int:
    """Drafts that a seeded request may keep at most: its share of the widest step.

    A constant of the server, so that neighbours can never take a row from it and the same seed
    keeps the same widths whether it runs alone or among others.
    """
    return max(max_rows // max_sequences - 1, 0)


def lower_hull(times_ms: F64) -> F64:
    """The largest convex curve below the times of 1 .. R rows, at every row. [R] -> [R]."""
    corners: list[int] = []
    for row in range(len(times_ms)):
        while len(corners) > 1 and _above(times_ms, corners[-2], corners[-1], row):
            corners.pop()
        corners.append(row)
    hull: F64 = np.interp(np.arange(len(times_ms)), corners, times_ms[corners])
    return hull


@dataclass(frozen=True)
class StepTimes:
    """Measured step times by rows. Immutable: `observed` gives the next one.

    The time of a width is an exponential average of running medians: one disturbed step changes
    nothing, a machine that slows down is followed within a few dozen steps. Widths that never ran
    take the prior's shape, scaled by how far the prior was off at the nearest widths that did.

    Units: ms. `prior_ms[r - 1]` for r rows, r up to the widest step; `samples` and `smooth`
    likewise, None = never ran.
    """

    prior_ms: tuple[float, ...]
    samples: tuple[tuple[float, ...], ...]
    smooth: tuple[float | None, ...]

    @classmethod
    def start(cls, prior_ms: Sequence[float]) -> StepTimes:
        """Nothing measured yet. `prior_ms` must be positive."""
        count = len(prior_ms)
        return cls(tuple(prior_ms), ((),) * count, (None,) * count)

    def observed(self, rows: int, ms: float) -> StepTimes:
        """The times after a step of `rows` rows took `ms`."""
        at = rows - 1
        samples = (*self.samples[at], ms)[-SAMPLES:]
        middle, before = median(samples), self.smooth[at]
        after = middle if before is None else before + SMOOTHING * (middle - before)
        return StepTimes(
            self.prior_ms, _replaced(self.samples, at, samples), _replaced(self.smooth, at, after)
        )

    @cached_property
    def times_ms(self) -> F64:
        """The estimate for 1 .. R rows. [R]."""
        prior = np.array(self.prior_ms)
        ran = [i for i, ms in enumerate(self.smooth) if ms is not None]
        if not ran:
            return prior
        off = np.array([ms for ms in self.smooth if ms is not None]) / prior[ran]
        estimate: F64 = prior * np.interp(np.arange(len(prior)), ran, off)
        return estimate

    @cached_property
    def hull_ms(self) -> F64:
        """Lower convex hull of `times_ms`; made anew when a time has changed. [R]."""
        return lower_hull(self.times_ms)


@dataclass(frozen=True)
class Rate:
    """Tokens and time of the recent steps, older ones faded. Immutable."""

    tokens: float
    ms: float

    @property
    def per_ms(self) -> float:
        """Tokens per ms, of all sequences together."""
        return self.tokens / self.ms

    def observed(self, tokens: int, ms: float) -> Rate:
        """The rate after a step that emitted `tokens` in `ms`."""
        fade = float(np.exp(-1 / RATE_STEPS))
        return Rate(self.tokens * fade + tokens, self.ms * fade + ms)


class Lesson(NamedTuple):
    """A step's confidences [S, B], drafts verified [S] and accepted [S], of S sequences."""

    confidences: F64
    kept: I64
    accepted: I64


@dataclass(frozen=True, eq=False)
class Chooser:
    """The width rule of a server with all that it has learnt. Immutable: `observed` gives the next.

    `thresholds` [B] of the fixed rule; `max_rows` of the widest step; `max_sequences` at once;
    `lessons` of fewer steps than the calibration learns of at once.
    """

    thresholds: tuple[float, ...]
    max_rows: int
    max_sequences: int
    times: StepTimes
    rate: Rate
    calibration: Calibration
    lessons: tuple[Lesson, ...] = ()

    @classmethod
    def start(
        cls,
        profile: Profile,
        max_rows: int,
        max_sequences: int,
        calibration: Calibration | None = None,
    ) -> Chooser:
        """What the profile of the machine says, until steps were measured; `calibration` may come
        from an earlier run.

        Raises:
            ConfigError: when a step has fewer rows than sequences.
        """
        if max_rows < max_sequences:
            raise ConfigError(
                f"max_sequences {max_sequences} is more than the {max_rows} rows of the widest step"
            )
        times = StepTimes.start(profile.step_ms(max_rows))
        rate = Rate(1.0, times.prior_ms[0])  # plain decoding; errs towards keeping drafts
        learnt = calibration or Calibration.start(profile.block)
        return cls(profile.thresholds, max_rows, max_sequences, times, rate, learnt)

    def rule(self, repeatable: Sequence[bool]) -> Rule:
        """What decides the widths of the next step.

        repeatable [S]: seeded with temperature above 0, so that the fixed rule holds.
        """
        own = seeded_drafts(self.max_rows, self.max_sequences)
        return Rule(
            self.calibration.chance,
            np.array(self.thresholds, np.float32),
            self._prices,
            np.where(repeatable, own, COMPETES).astype(np.int32),
        )

    @cached_property
    def _prices(self) -> F32:
        return prices(self.times.hull_ms, self.rate.per_ms)

    def observed(
        self, ms: float, confidences: F64, kept: I64, accepted: I64, masked: Sequence[bool]
    ) -> Chooser:
        """After a step of `ms` that verified `kept` [S] drafts and accepted `accepted` [S] of them.

        confidences: [S, B] of those drafts; masked [S]: under a token mask, teaches no calibration.
        """
        rows = int(len(kept) + kept.sum())
        times = self.times.observed(rows, ms)
        # The smoothed time: one disturbed step must not halve the rate.
        rate = self.rate.observed(int(len(kept) + accepted.sum()), float(times.times_ms[rows - 1]))
        free = ~np.asarray(masked, np.bool_)
        lessons = (*self.lessons, Lesson(confidences[free], kept[free], accepted[free]))
        calibration = self.calibration
        if len(lessons) == LESSONS:
            together = (np.concatenate(column) for column in zip(*lessons, strict=True))
            calibration, lessons = calibration.observed(*together), ()
        return replace(self, times=times, rate=rate, calibration=calibration, lessons=lessons)


def prices(hull_ms: F64, rate: float) -> F32:
    """The survival that each row must exceed to be worth its time, at a rate of tokens per ms. [R]

    hull_ms: [R] times of 1 .. R rows (`StepTimes.hull_ms`). The first row is every step's own.
    """
    return (np.diff(hull_ms, prepend=hull_ms[0]) * rate).astype(np.float32)


def _above(y: F64, left: int, middle: int, right: int) -> bool:
    """Whether the middle point lies on or above the line from left to right."""
    return bool((y[middle] - y[left]) * (right - left) >= (y[right] - y[left]) * (middle - left))


def _replaced(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
