"""The width rule: a stopping rule, the best one for a convex cost, shared fairly, learnt from
steps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.properties import examples
from helpers.verify_tree import Tree
from ultraflash.graphs.numerics import F64
from ultraflash.runtime.calibration import Calibration
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.profiles import select_profile
from ultraflash.runtime.width import (
    Candidate,
    Chooser,
    Rate,
    StepTimes,
    keep_adaptive,
    keep_fixed,
    lower_hull,
    seeded_drafts,
    share_rows,
    survival,
)

B = 5
logits = hnp.arrays(np.float64, (3, B), elements=st.floats(-6, 6))
costs = st.lists(st.floats(0.01, 1), min_size=15, max_size=15)


def times_of(increments: list[float]) -> F64:
    return 1 + np.concatenate([[0], np.cumsum(increments)])


# --- survivals and the rules ---


def test_survival_is_the_product_of_confidences() -> None:
    got = survival(np.array([[0.0, np.log(3), 100.0]]))
    np.testing.assert_allclose(got, [[0.5, 0.375, 0.375]])


def test_survival_takes_what_the_calibration_says() -> None:
    sure, table = np.full((200, B), 2.0), Calibration.start(B)
    for _ in range(10):
        table = table.observed(sure, np.full(200, B), np.zeros(200, np.int64))
    assert survival(sure[:1], table)[0, 0] < 0.05 < survival(sure[:1])[0, 0]


def test_the_fixed_rule_stops_at_the_first_failure() -> None:
    survivals = np.array([[0.9, 0.5, 0.2, 0.16, 0.1], [0.2, 0.1, 0.1, 0.1, 0.1], [1.0] * 5])
    kept = keep_fixed(survivals, (0.3, 0.3, 0.3, 0.15, 0.075))
    assert kept.tolist() == [2, 0, 5]


@examples(200)
@given(increments=costs, confidences=logits, rate=st.floats(0.1, 5))
def test_the_adaptive_rule_is_the_best_width_on_the_hull(
    increments: list[float], confidences: F64, rate: float
) -> None:
    hull = lower_hull(times_of(increments))
    survivals = survival(confidences)
    kept = keep_adaptive(survivals, hull, rate)
    gain = np.concatenate([np.zeros((3, 1)), np.cumsum(survivals, axis=1)], axis=1)
    worth = gain - rate * hull[: B + 1]
    best = worth.max(axis=1)
    np.testing.assert_allclose(worth[np.arange(3), kept], best, rtol=0, atol=1e-9)
    shared = [share_rows([Candidate(s)], hull, rate, 16)[0] for s in survivals]
    assert shared == kept.tolist()


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


# --- several sequences ---


def causal(kept: tuple[int, ...], again: tuple[int, ...], sequence: int, known: int) -> bool:
    """Whether drafts 1 .. known of the sequence were decided alike."""
    return min(kept[sequence], known) == min(again[sequence], known)


@examples(300)
@given(data=st.data(), increments=costs, rate=st.floats(0.1, 5), max_rows=st.integers(3, 16))
def test_confidences_behind_a_draft_never_decide_about_it(
    data: st.DataObject, increments: list[float], rate: float, max_rows: int
) -> None:
    hull, confidences = lower_hull(times_of(increments)), data.draw(logits)
    sequence, known = data.draw(st.integers(0, 2)), data.draw(st.integers(1, B))
    other = confidences.copy()
    # c_0 .. c_(known - 1) exist before draft `known` is made; what comes behind may be anything.
    other[sequence, known:] = data.draw(logits)[sequence, known:]
    kept, again = (
        share_rows([Candidate(s) for s in survival(c)], hull, rate, max_rows)
        for c in (confidences, other)
    )
    assert causal(kept, again, sequence, known)


def test_the_larger_survival_gets_the_row() -> None:
    survivals = np.array([[0.9, 0.5, 0.4], [0.8, 0.7, 0.1], [0.3, 0.2, 0.1]])
    candidates, free = [Candidate(s) for s in survivals], np.ones(10)
    assert [share_rows(candidates, free, 1.0, rows) for rows in (3, 4, 5, 6, 7, 8, 9, 12)] == [
        (0, 0, 0),
        (1, 0, 0),
        (1, 1, 0),
        (1, 2, 0),
        (2, 2, 0),
        (3, 2, 0),
        (3, 2, 1),
        (3, 3, 3),
    ]


def test_a_row_that_is_not_worth_its_time_ends_the_sharing() -> None:
    candidates = [Candidate(np.array([0.9, 0.5])), Candidate(np.array([0.8, 0.7]))]
    hull = np.arange(1.0, 9.0)  # each row costs 1 ms
    assert share_rows(candidates, hull, 0.75, 8) == (1, 1)
    assert share_rows(candidates, hull, 0.71, 8) == (1, 1)
    assert share_rows(candidates, hull, 0.6, 8) == (1, 2)
    assert share_rows(candidates, hull, 0.95, 8) == (0, 0)
    rising = np.array([1.0, 1.1, 2.1, 4.1, 8.1])  # the first row behind two anchors costs 1 ms
    assert share_rows(candidates, rising, 0.85, 8) == (1, 0)
    assert share_rows(candidates, rising, 0.95, 8) == (0, 0)


def test_among_equals_the_earlier_sequence_comes_first_and_rows_stay_in_order() -> None:
    candidates = [Candidate(np.array([1.0, 1.0, 1.0]))] * 2
    assert share_rows(candidates, np.ones(8), 1.0, 6) == (3, 1)


def test_reserved_drafts_are_kept_whatever_the_neighbours_want() -> None:
    greedy = Candidate(np.ones(5))
    hull = np.arange(1.0, 17.0)
    seeded = Candidate(np.full(5, 0.01), reserved=3)
    assert share_rows([greedy, seeded, greedy], hull, 0.1, 8) == (2, 3, 0)
    assert share_rows([seeded], hull, 10.0, 8) == (3,)
    with pytest.raises(ConfigError, match="2 sequences need at least 8 rows, a step has 7"):
        share_rows([seeded, seeded], hull, 1.0, 7)


def test_nobody_wants_more_than_there_are_drafts() -> None:
    candidates = [Candidate(np.zeros(0)), Candidate(np.array([0.9]))]
    assert share_rows(candidates, np.ones(8), 1.0, 8) == (0, 1)
    assert share_rows([], np.ones(8), 1.0, 8) == ()


@pytest.mark.parametrize(
    ("max_rows", "widths"), [(4, {(0, 2), (1, 1)}), (5, {(1, 1), (1, 2), (2, 1)})]
)
def test_two_sequences_that_share_rows_write_what_they_would_alone(
    max_rows: int, widths: set[tuple[int, ...]], rng: np.random.Generator
) -> None:
    """Exactly: every pair of draft blocks, rows shared by survivals that depend on the drafts."""
    vocab, m = 2, 2

    def model(depth: int) -> list[F64]:
        return [rng.dirichlet(np.ones(vocab), vocab**i) for i in range(depth)]

    trees = [Tree(model(m + 1), model(m)) for _ in range(2)]
    drafts = trees[0].drafts
    # c_0 is fixed (the anchor is), c_1 depends on the first draft.
    confidences = [
        np.stack([np.full(4, c0), np.where(drafts[:, 0], 3.0, -3.0) + c0], axis=1)
        for c0 in (1.0, 1.2)
    ]
    tables = [
        np.stack([tree.emissions("block", k) for k in range(m + 1)], axis=1) for tree in trees
    ]
    joint, seen = np.zeros((vocab ** (m + 1),) * 2), set()
    hull = np.array([1.0, 1.1, 1.3, 1.6, 2.0])
    for a, b in product(range(len(drafts)), repeat=2):
        blocks = (a, b)
        survivals = [survival(c[block]) for c, block in zip(confidences, blocks, strict=True)]
        kept = share_rows([Candidate(s) for s in survivals], hull, 1.5, max_rows)
        seen.add(kept)
        left, right = (
            tree.chance[block] * table[block, k]
            for tree, block, table, k in zip(trees, blocks, tables, kept, strict=True)
        )
        joint += np.outer(left, right)
    assert seen == widths
    np.testing.assert_allclose(joint, np.outer(trees[0].target, trees[1].target), atol=1e-12)


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


def test_a_seeded_request_keeps_its_widths_among_any_neighbours_and_after_any_history(
    rng: np.random.Generator,
) -> None:
    taught = chooser()
    for _ in range(50):
        kept = np.full(3, 4)
        confidences = rng.normal(2, 1, (3, B))
        taught = taught.observed(9.0, confidences, kept, np.zeros(3, np.int64), [False] * 3)
    own = rng.normal(1, 2, B)
    alone = chooser().choose(own[None], [True], [B])
    assert alone == (min(3, *keep_fixed(survival(own[None]), chooser().thresholds).tolist()),)
    for _ in range(20):
        crowd = np.concatenate([own[None], rng.normal(3, 2, (3, B))])
        assert taught.choose(crowd, [True, True, False, False], [B] * 4)[0] == alone[0]


def test_seeded_requests_fill_the_widest_step_at_most() -> None:
    sure = np.full((4, B), 9.0)
    assert chooser().choose(sure, [True] * 4, [B] * 4) == (3, 3, 3, 3)
    assert chooser(max_sequences=1).choose(sure[:1], [True], [B]) == (5,)
    assert [seeded_drafts(8, n) for n in (1, 2, 4, 8)] == [7, 3, 1, 0]


def test_limits_hold_for_both_rules() -> None:
    sure = np.full((2, B), 9.0)
    assert chooser(max_sequences=2).choose(sure, [True, False], [2, 1]) == (2, 1)
    assert chooser(max_sequences=2).choose(sure, [True, False], [0, 0]) == (0, 0)


def test_rejections_narrow_the_next_steps_and_acceptances_widen_them() -> None:
    confidences = np.full((1, B), 1.0)
    narrow = wide = chooser(max_sequences=1)
    for _ in range(150):
        kept = np.array([3])
        narrow = narrow.observed(3.0, confidences, kept, np.array([0]), [False])
        wide = wide.observed(3.0, confidences, kept, kept, [False])
    start, less, more = (c.choose(confidences, [False], [B])[0] for c in (chooser(), narrow, wide))
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
