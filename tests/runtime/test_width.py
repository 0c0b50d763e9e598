"""The numbers of the width rule: hull, times, rate, calibration, learnt from steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from ultraflash.graphs.numerics import F64
from ultraflash.graphs.width import COMPETES, keep_fixed, survival
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.profiles import select_profile
from ultraflash.runtime.width import Chooser, Rate, StepTimes, lower_hull, prices, seeded_drafts

B = 5


@examples(100)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=16))
def test_the_hull_is_the_largest_convex_curve_below(times: list[float]) -> None:
    y = np.array(times)
    hull = lower_hull(y)
    assert (hull <= y + 1e-12).all()
    assert (np.diff(hull, 2) >= -1e-9).all()
    x = np.arange(len(y))
    for at in x:  # no chord between two times passes below it
        chords = [
            y[i] + (y[j] - y[i]) * (at - i) / (j - i) for i in x[: at + 1] for j in x[at:] if i < j
        ]
        assert hull[at] == pytest.approx(min([y[at], *chords]))


def test_a_row_has_to_exceed_what_it_costs_at_the_current_rate() -> None:
    hull = np.array([1.0, 1.1, 1.4, 2.0])
    np.testing.assert_allclose(prices(hull, 2.0)[1:], [0.2, 0.6, 1.2], rtol=1e-6)
    assert prices(np.array([3.0]), 2.0).tolist() == [0.0]


# --- what is measured ---


def test_one_disturbed_step_changes_no_time_and_a_slower_machine_is_followed() -> None:
    times = StepTimes.start([4.0, 4.2, 4.4])
    for _ in range(20):
        times = times.observed(2, 3.0)
    assert times.observed(2, 90.0).times_ms[1] == pytest.approx(3.0)
    for _ in range(40):
        times = times.observed(2, 6.0)
    assert times.times_ms[1] == pytest.approx(6.0, rel=0.01)


def test_widths_that_never_ran_take_the_priors_shape() -> None:
    times = StepTimes.start([10.0, 12.0, 14.0, 16.0])
    assert times.times_ms.tolist() == [10, 12, 14, 16]
    np.testing.assert_allclose(times.observed(2, 6.0).times_ms, [5, 6, 7, 8])
    both = times.observed(2, 6.0).observed(4, 16.0)
    np.testing.assert_allclose(both.times_ms, [5, 6, 14 * 0.75, 16])
    assert (both.hull_ms <= both.times_ms).all()
    assert times.times_ms.tolist() == [10, 12, 14, 16], "the older times have changed"


def test_the_rate_forgets() -> None:
    rate = Rate(1.0, 5.0)
    for _ in range(200):
        rate = rate.observed(4, 2.0)
    assert rate.per_ms == pytest.approx(2.0, rel=0.01)


# --- all together ---


def chooser(max_rows: int = 16, max_sequences: int = 4) -> Chooser:
    return Chooser.start(select_profile("sm_90a", 8), max_rows, max_sequences)


def choose(
    by: Chooser, confidences: F64, repeatable: list[bool], limits: list[int]
) -> tuple[int, ...]:
    room = np.array(limits, np.int32)
    rule = by.rule(repeatable)
    return tuple(rule.kept(confidences.astype(np.float32), room, by.max_rows).tolist())


def test_survivals_are_what_the_calibration_says() -> None:
    sure, by = np.full((200, B), 2.0), chooser()
    for _ in range(10):
        learnt = by.calibration.observed(sure, np.full(200, B), np.zeros(200, np.int64))
        by = replace(by, calibration=learnt)
    raw, learnt_chance = by.rule([False]).chance
    one = np.full((1, B), 2.0, np.float32)
    assert survival(one, learnt_chance)[0, 0] < 0.05 < 0.85 < survival(one, raw)[0, 0]
    assert by.rule([True, False]).own.tolist() == [3, COMPETES]


def test_a_seeded_request_keeps_its_widths_among_any_neighbours_and_after_any_history(
    rng: np.random.Generator,
) -> None:
    taught = chooser()
    for _ in range(50):
        kept = np.full(3, 4)
        confidences = rng.normal(2, 1, (3, B))
        taught = taught.observed(9.0, confidences, kept, np.zeros(3, np.int64), [False] * 3)
    own = rng.normal(1, 2, B)
    alone = choose(chooser(), own[None], [True], [B])
    rule = chooser().rule([True])
    raw = survival(own[None].astype(np.float32), rule.chance[0])
    assert alone == (min(3, *keep_fixed(raw, rule.threshold).tolist()),)
    for _ in range(20):
        crowd = np.concatenate([own[None], rng.normal(3, 2, (3, B))])
        assert choose(taught, crowd, [True, True, False, False], [B] * 4)[0] == alone[0]


def test_seeded_requests_fill_the_widest_step_at_most() -> None:
    sure = np.full((4, B), 9.0)
    assert choose(chooser(), sure, [True] * 4, [B] * 4) == (3, 3, 3, 3)
    assert choose(chooser(max_sequences=1), sure[:1], [True], [B]) == (5,)
    assert [seeded_drafts(8, n) for n in (1, 2, 4, 8)] == [7, 3, 1, 0]


def test_limits_hold_for_both_rules() -> None:
    sure = np.full((2, B), 9.0)
    assert choose(chooser(max_sequences=2), sure, [True, False], [2, 1]) == (2, 1)
    assert choose(chooser(max_sequences=2), sure, [True, False], [0, 0]) == (0, 0)


def test_rejections_narrow_the_next_steps_and_acceptances_widen_them() -> None:
    confidences = np.full((1, B), 1.0)
    narrow = wide = chooser(max_sequences=1)
    for _ in range(150):
        kept = np.array([3])
        narrow = narrow.observed(3.0, confidences, kept, np.array([0]), [False])
        wide = wide.observed(3.0, confidences, kept, kept, [False])
    start, less, more = (choose(c, confidences, [False], [B])[0] for c in (chooser(), narrow, wide))
    assert less <= start <= more
    assert less < more


def test_a_masked_sequence_teaches_no_confidence_but_its_time_counts() -> None:
    before = chooser()
    after = before.observed(7.0, np.ones((1, B)), np.array([3]), np.array([0]), [True])
    assert (after.calibration.counts == before.calibration.counts).all()
    assert after.times.times_ms[3] == pytest.approx(7.0)
    assert after.rate.per_ms < before.rate.per_ms


def test_more_sequences_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_sequences 5 is more than the 4 rows"):
        chooser(max_rows=4, max_sequences=5)
