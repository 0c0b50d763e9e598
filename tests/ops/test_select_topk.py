from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.compare import assert_same_bits
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch
from helpers.properties import examples
from ultraflash.graphs.ops.select_topk import SelectTopk

I32 = npt.NDArray[np.int32]


def by_definition(
    scores: list[float], reach: int, pool: list[int] | None, block_size: int, k: int
) -> list[int]:
    """The k best reachable entries (inside the pool), ties to the smaller, ascending, then -1."""
    allowed = [
        j for j in range(reach) if pool is None or j // block_size in [b for b in pool if b >= 0]
    ]
    best = sorted(allowed, key=lambda j: (-scores[j], j))[:k]
    return sorted(best) + [-1] * (k - len(best))


def masked(scores: list[list[float]], reach: list[int]) -> npt.NDArray[np.float32]:
    array = np.array(scores, np.float32)
    for row, n in enumerate(reach):
        array[row, n:] = -np.inf
    return array


def in_the_order_of(pool: I32, scores: npt.NDArray[np.float32], size: int) -> Any:
    """Scores as they stand beside a pool: its blocks one behind the other, -inf where none is."""
    blocks = scores.shape[1] // size + 2
    padded = np.full((len(scores), blocks * size), -np.inf, np.float32)
    padded[:, : scores.shape[1]] = scores  # block -1 is the last one: nothing
    found = padded.reshape(len(scores), blocks, size)[np.arange(len(scores))[:, None], pool]
    return found.reshape(len(scores), -1)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("k", [1, 4, 8, 40])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_against_a_sort(rng: np.random.Generator, ratio: int, k: int, levels: int) -> None:
    """Few levels: ties everywhere."""
    position = np.array([0, 1, 2, 6, 7, 15, 30, 59], np.int32)
    reach = [(int(p) + 1) // ratio for p in position]
    scores = masked(rng.integers(0, levels, size=(8, 60 // ratio)).tolist(), reach)
    y = SelectTopk.reference(scores, position, None, ratio, 4, k)
    assert y.dtype == np.int32
    for row, n in enumerate(reach):
        assert y[row].tolist() == by_definition(scores[row].tolist(), n, None, 4, k)


@examples(300)
@given(data=st.data())
def test_inside_a_pool(data: Any) -> None:
    reach = data.draw(st.integers(0, 30), "reach")
    size = data.draw(st.sampled_from([1, 3, 4]), "block size")
    blocks = -(-reach // size)
    pool = sorted(data.draw(st.sets(st.integers(0, max(blocks - 1, 0)), max_size=6), "pool"))
    pool = [b for b in pool if b < blocks]
    scores = data.draw(
        st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=31, max_size=31), "scores"
    )
    k = data.draw(st.integers(1, 9), "k")
    padded = np.array([[*pool, *[-1] * (7 - len(pool))]], np.int32)
    inside = in_the_order_of(padded, masked([scores], [reach]), size)
    y = SelectTopk.reference(inside, np.array([reach - 1], np.int32), padded, 1, size, k)
    assert y[0].tolist() == by_definition(scores, reach, pool, size, k)


def test_few_entries_are_all_selected_whatever_their_scores() -> None:
    scores = np.array([[-5.0, -7.0, -6.0, -np.inf]], np.float32)
    y = SelectTopk.reference(scores, np.array([2], np.int32), None, 1, 4, 8)
    assert y.tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]


def test_the_newest_block_may_be_cut() -> None:
    """Block 2 of size 4 holds entries 8 and 9 only when ten can be reached."""
    scores = np.array([[0, 0, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf]], np.float32)
    pool = np.array([[2, -1]], np.int32)
    y = SelectTopk.reference(scores, np.array([9], np.int32), pool, 1, 4, 4)
    assert y.tolist() == [[8, 9, -1, -1]]


def test_minus_zero_ties_with_zero() -> None:
    scores = np.array([[-0.0, 0.0, -0.0, 0.0]], np.float32)
    y = SelectTopk.reference(scores, np.array([3], np.int32), None, 1, 4, 2)
    assert y.tolist() == [[0, 1]]


def test_an_idle_row_does_no_harm() -> None:
    """Position 0, every score unreachable."""
    scores = np.full((1, 12), -np.inf, np.float32)
    for pool in (None, np.full((1, 3), -1, np.int32), np.array([[0, -1, -1]], np.int32)):
        y = SelectTopk.reference(scores, np.zeros(1, np.int32), pool, 1, 4, 4)
        assert set(y[0].tolist()) <= {-1, 0}


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    position = np.arange(31, 40, dtype=np.int32)
    scores = masked(rng.integers(0, 5, size=(9, 40)).tolist(), [int(p) + 1 for p in position])
    pool = np.sort(rng.permuted(np.tile(np.arange(8), (9, 1)), axis=1)[:, :5], axis=1)
    pool = pool.astype(np.int32)
    assert_rows_alone(
        lambda s, p, b: SelectTopk.reference(s, p, b, 1, 4, 8),
        [in_the_order_of(pool, scores, 4), position, pool],
        choice,
    )


def test_scores_are_left_alone(rng: np.random.Generator) -> None:
    scores = rng.normal(size=(2, 20)).astype(np.float32)
    before = scores.copy()
    SelectTopk.reference(scores, np.full(2, 19, np.int32), None, 1, 4, 8)
    assert_same_bits(scores, before)


OP = SelectTopk(
    scratch("s", 3, 20, dtype="f32"),
    io("p", 3),
    scratch("b", 3, 5, dtype="i32"),
    scratch("y", 3, 8, dtype="i32"),
    1,
    4,
    8,
)


def test_launch() -> None:
    assert_launch(OP, "select_topk", ("s", "p", "b", "y"), ratio=1, block_size=4, k=8)
    without = SelectTopk(OP.scores, OP.position, None, OP.y, 2, 4, 8)
    assert_launch(without, "select_topk", ("s", "p", "y"), pool=None)


def test_cost() -> None:
    assert_cost(OP, 4 * 3 * (20 + 1 + 5 + 8))
