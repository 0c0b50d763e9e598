"""The width rule: a stopping rule, the best one for a convex cost, shared fairly."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.properties import examples
from helpers.verify_tree import Tree
from ultraflash.graphs.numerics import F32, F64
from ultraflash.graphs.width import COMPETES, KNOTS, Rule, chances, keep_fixed, room, survival
from ultraflash.runtime.width import lower_hull, prices

B = 5
RAW = np.tile((1 / (1 + np.exp(-KNOTS))).astype(np.float32), (B, 1))
logits = hnp.arrays(np.float32, (3, B), elements=st.floats(-6, 6, width=32))
costs = st.lists(st.floats(0.01, 1), min_size=15, max_size=15)


def times_of(increments: list[float]) -> F64:
    return 1 + np.concatenate([[0], np.cumsum(increments)])


def shared(
    survivals: list[list[float]] | F32, hull: F64, rate: float, rows: int,
    own: list[int] | None = None, fixed: int = 0,
) -> tuple[int, ...]:  # fmt: skip
    """Rows of sequences whose drafts survive so often; as many drafts as survivals are given."""
    worth = np.zeros((len(survivals), B), np.float32)
    for row, given_ in zip(worth, survivals, strict=True):
        row[: len(given_)] = given_
    limits = np.array([len(each) for each in survivals], np.int32)
    price = prices(
        np.concatenate([hull, hull[-1] + (hull[-1] - hull[-2]) * np.arange(1, 16)]), rate
    )
    rule = Rule(np.zeros((2, B, 1), np.float32), np.zeros(B, np.float32), price,
                np.array(own or [COMPETES] * len(survivals), np.int32))  # fmt: skip
    return tuple(rule.shared(np.full(len(limits), fixed), worth, limits, rows).tolist())


# --- survivals and the rules ---


def test_survival_is_the_product_of_confidences() -> None:
    got = survival(np.array([[0.0, np.log(3), 100.0, -100.0, 0.0]], np.float32), RAW)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[0.5, 0.375, 0.375, 1.256e-4, 6.28e-5]], rtol=2e-3, atol=0)


def test_chances_are_linear_between_knots_and_constant_beyond(rng: np.random.Generator) -> None:
    table = np.sort(rng.random((B, len(KNOTS)))).astype(np.float32)
    c = rng.uniform(-10, 10, (40, B)).astype(np.float32)
    want = np.stack([np.interp(c[:, i], KNOTS, table[i]) for i in range(B)], axis=1)
    np.testing.assert_allclose(chances(c, table), want, atol=1e-6)
    assert (table == chances(np.tile(KNOTS[:, None].astype(np.float32), B), table).T).all()


def test_the_fixed_rule_stops_at_the_first_failure() -> None:
    survivals = np.array([[0.9, 0.5, 0.2, 0.16, 0.1], [0.2, 0.1, 0.1, 0.1, 0.1], [1.0] * 5])
    wanted = np.array([0.3, 0.3, 0.3, 0.15, 0.075], np.float32)
    assert keep_fixed(survivals.astype(np.float32), wanted).tolist() == [2, 0, 5]


@examples(200)
@given(increments=costs, confidences=logits, rate=st.floats(0.1, 5))
def test_the_adaptive_rule_is_the_best_width_on_the_hull(
    increments: list[float], confidences: F32, rate: float
) -> None:
    hull = lower_hull(times_of(increments))
    survivals = survival(confidences, RAW)
    kept = [shared(s[None], hull, rate, 16)[0] for s in survivals]
    gain = np.concatenate([np.zeros((3, 1)), np.cumsum(survivals, axis=1)], axis=1)
    worth = gain - rate * hull[: B + 1]
    np.testing.assert_allclose(worth[np.arange(3), kept], worth.max(axis=1), rtol=0, atol=1e-5)
    wanted = prices(hull, rate)[1 : 1 + B]
    assert keep_fixed(survivals, wanted).tolist() == kept


def test_room_is_for_drafts_and_the_token_behind_them() -> None:
    length = np.array([10, 18, 19, 25], np.int32)
    assert room(length, np.array([40, 21, 20, 20], np.int32), B).tolist() == [B, 2, 0, 0]


def test_everything_deals_the_rows_that_there_are_one_by_one() -> None:
    def dealt(rows: int, *limits: int) -> list[int]:
        rule, room = Rule.everything(B, rows, len(limits)), np.array(limits, np.int32)
        found: list[int] = rule.kept(np.full((len(limits), B), -9, np.float32), room, rows).tolist()
        return found

    assert dealt(8, 5) == [5]
    assert dealt(8, 5, 5) == [3, 3]
    assert dealt(8, 5, 5, 5) == [2, 2, 1]
    assert dealt(8, 1, 5, 0) == [1, 4, 0]
    assert dealt(4, 5, 5, 5, 5) == [0] * 4


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
    kept, again = (shared(survival(c, RAW), hull, rate, max_rows) for c in (confidences, other))
    assert causal(kept, again, sequence, known)


def test_the_larger_survival_gets_the_row() -> None:
    survivals, free = [[0.9, 0.5, 0.4], [0.8, 0.7, 0.1], [0.3, 0.2, 0.1]], np.ones(10)
    assert [shared(survivals, free, 1.0, rows) for rows in (3, 4, 5, 6, 7, 8, 9, 12)] == [
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
    survivals = [[0.9, 0.5], [0.8, 0.7]]
    hull = np.arange(1.0, 9.0)  # each row costs 1 ms
    assert shared(survivals, hull, 0.75, 8) == (1, 1)
    assert shared(survivals, hull, 0.71, 8) == (1, 1)
    assert shared(survivals, hull, 0.6, 8) == (1, 2)
    assert shared(survivals, hull, 0.95, 8) == (0, 0)
    rising = np.array([1.0, 1.1, 2.1, 4.1, 8.1])  # the first row behind two anchors costs 1 ms
    assert shared(survivals, rising, 0.85, 8) == (1, 0)
    assert shared(survivals, rising, 0.95, 8) == (0, 0)


def test_equals_take_turns_and_the_earlier_sequence_comes_first() -> None:
    assert shared([[1.0, 1.0, 1.0]] * 2, np.ones(8), 1.0, 6) == (2, 2)
    assert shared([[1.0, 1.0, 1.0]] * 2, np.ones(8), 1.0, 5) == (2, 1)


def test_reserved_drafts_are_kept_whatever_the_neighbours_want() -> None:
    likely, unlikely, hull = [1.0] * 5, [0.01] * 5, np.arange(1.0, 17.0)
    assert shared([likely, unlikely, likely], hull, 0.1, 8, [-1, 3, -1], fixed=4) == (1, 3, 1)
    assert shared([unlikely], hull, 10.0, 8, [3], fixed=4) == (3,)
    assert shared([unlikely], hull, 10.0, 8, [3], fixed=1) == (1,)
    assert shared([unlikely[:2]], hull, 10.0, 8, [3], fixed=4) == (2,)


def test_nobody_gets_more_rows_than_there_are() -> None:
    assert shared([[1.0] * 5] * 2, np.ones(8), 1.0, 7, [3, 3], fixed=3) == (3, 2)


def test_nobody_wants_more_than_there_are_drafts() -> None:
    assert shared([[], [0.9]], np.ones(8), 1.0, 8) == (0, 1)


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
        pairs = zip(confidences, blocks, strict=True)
        chosen = np.stack([c[block] for c, block in pairs]).astype(np.float32)
        kept = shared(survival(chosen, RAW[:2]), hull, 1.5, max_rows)
        seen.add(kept)
        left, right = (
            tree.chance[block] * table[block, k]
            for tree, block, table, k in zip(trees, blocks, tables, kept, strict=True)
        )
        joint += np.outer(left, right)
    assert seen == widths
    np.testing.assert_allclose(joint, np.outer(trees[0].target, trees[1].target), atol=1e-12)
