from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch
from helpers.properties import examples
from helpers.tiny import golden, tensors
from ultraflash.graphs.ops.candidate_pool import CandidatePool


def by_definition(scores: list[float], reach: int, size: int, blocks: int) -> list[int]:
    """Model.md 4.6: best blocks by best reachable score, the newest forced, earlier on ties."""
    count = -(-reach // size)
    best = [max(scores[b * size : min((b + 1) * size, reach)]) for b in range(count)]
    order = sorted(range(count), key=lambda b: (b != count - 1, -best[b], b))
    kept = sorted(order[:blocks])
    return kept + [-1] * (blocks - len(kept))


@examples(300)
@given(data=st.data())
def test_against_a_sort(data: Any) -> None:
    reach = data.draw(st.integers(0, 40), "reach")
    size, blocks = data.draw(st.sampled_from([(4, 4), (8, 3), (3, 5), (1, 6)]), "sizes")
    levels = data.draw(st.sampled_from([[0.0, 1.0], [-2.0, -1.5, 0.0, 3.0, 4.0]]), "levels")
    scores = data.draw(st.lists(st.sampled_from(levels), min_size=41, max_size=41), "scores")
    array = np.array([scores], np.float32)
    array[0, reach:] = -np.inf
    y = CandidatePool.reference(array, np.array([reach - 1], np.int32), 1, size, blocks)
    assert y.dtype == np.int32
    assert y[0].tolist() == by_definition(scores, reach, size, blocks)


def test_unreachable_scores_do_not_count() -> None:
    """A stale key behind the row's reach may not lift its block, nor anything behind it."""
    scores = np.zeros((1, 16), np.float32)
    scores[0, [1, 4]] = 1, 2
    scores[0, 9:] = 99
    y = CandidatePool.reference(scores, np.array([8], np.int32), 1, 4, 2)
    assert y.tolist() == [[1, 2]]


def test_the_newest_block_is_always_there() -> None:
    scores = np.full((1, 12), 5, np.float32)
    scores[0, 8:] = -100
    y = CandidatePool.reference(scores, np.array([11], np.int32), 1, 4, 1)
    assert y.tolist() == [[2]]


@pytest.mark.parametrize("ratio", [1, 2])
def test_reach_follows_the_ratio(ratio: int) -> None:
    scores = np.zeros((2, 20), np.float32)
    y = CandidatePool.reference(scores, np.array([4, 5], np.int32), ratio, 2, 8)
    for row, position in enumerate((4, 5)):
        count = -(-((position + 1) // ratio) // 2)
        assert y[row].tolist() == [*range(count), *[-1] * (8 - count)]


def test_the_pool_holds_enough_for_a_selection() -> None:
    """Even when the newest block has a single entry (the limit that Model checks)."""
    scores = np.random.default_rng(1).normal(size=(1, 41)).astype(np.float32)
    y = CandidatePool.reference(scores, np.array([40], np.int32), 1, 4, 4)
    assert sum(min(4, 41 - 4 * b) for b in y[0]) == 3 * 4 + 1


@pytest.mark.parametrize("length", [33, 100, 257])
def test_against_the_authors(length: int) -> None:
    """The pools of a prompt, from which the later index layers chose."""
    pools = tensors("decisions")[f"P{length}.pool"]
    model = golden().model
    selected = tensors("decisions")
    for row, members in enumerate(pools):
        blocks = {int(j) // model.candidate_block_size for j in np.flatnonzero(members)}
        reach = row + 1
        assert len(blocks) == min(model.candidate_blocks, -(-reach // model.candidate_block_size))
        assert (reach - 1) // model.candidate_block_size in blocks
        for layer in model.index_sources:
            if layer > model.candidate_source:
                chosen = selected[f"P{length}.L{layer}.sel"][row]
                assert {int(j) // model.candidate_block_size for j in chosen if j >= 0} <= blocks


@pytest.mark.parametrize("call", ["prefill", "decode0", "decode1"])
def test_against_the_authors_scores(call: str) -> None:
    """From golden scores of the candidate source to golden masks of the next index layer."""
    layers, model = tensors("layers_f32idx_P33"), golden().model
    scores = layers[f"{call}.L{model.candidate_source}.index_scores"]
    later = min(s for s in model.index_sources if s > model.candidate_source)
    masked = layers[f"{call}.L{later}.index_scores"]
    start = {"prefill": 0, "decode0": 33, "decode1": 34}[call]
    position: npt.NDArray[np.int32] = np.arange(start, start + len(scores), dtype=np.int32)
    size = model.candidate_block_size
    pool = CandidatePool.reference(scores, position, 1, size, model.candidate_blocks)
    for row in range(len(scores)):
        inside = [j for j in range(position[row] + 1) if j // size in pool[row]]
        assert np.flatnonzero(np.isfinite(masked[row])).tolist() == inside


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    position = np.arange(31, 40, dtype=np.int32)
    scores = rng.integers(0, 5, size=(9, 40)).astype(np.float32)
    assert_rows_alone(
        lambda s, p: CandidatePool.reference(s, p, 1, 4, 4), [scores, position], choice
    )


OP = CandidatePool(
    scratch("s", 3, 100, dtype="f32"), io("p", 3), scratch("y", 3, 4, dtype="i32"), 1, 4, 4
)


def test_launch() -> None:
    assert_launch(OP, "candidate_pool", ("s", "p", "y"), ratio=1, block_size=4, blocks=4)


def test_cost() -> None:
    assert_cost(OP, 4 * 3 * (100 + 1 + 4))
