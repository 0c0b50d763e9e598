from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.compare import assert_within
from helpers.formats import F32, bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.properties import examples
from helpers.tiny import tensors
from ultraflash.graphs.ops.gate import Gate, route
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.rows import I32

SCALE = 1.5


def score(logit: float) -> float:
    """sqrt(softplus), the identity above 20."""
    return math.sqrt(logit if logit > 20 else math.log1p(math.exp(logit)))


def live(rows: int) -> I32:
    """Slots of rows none of which is idle."""
    return np.arange(rows, dtype=np.int32)


@pytest.mark.parametrize("which", ["full", "tiny"])
def test_against_the_authors(which: str) -> None:
    golden = tensors("gate")
    x, w, bias, bias_vl, is_image = (
        golden[f"{which}.{name}"] for name in ("x", "weight", "bias", "bias_vl", "is_image")
    )
    want_ids, want = golden[f"{which}.ids_sorted"], golden[f"{which}.w_sorted"]
    logits = Linear.reference(x, w.astype(np.float64), groups=1, rounded=False)
    ids, weights = Gate.reference(
        logits, bias, bias_vl, is_image.astype(np.int32), live(len(x)), want_ids.shape[1], SCALE
    )
    assert ids.dtype == np.int32
    assert np.array_equal(ids, want_ids)
    assert_within(weights, want, 1e-5)  # fp32 logits of both: another order of sums


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("experts", "k"), [(8, 3), (384, 6), (4, 4), (8, 1)])
def test_against_float64(rng: np.random.Generator, rows: int, experts: int, k: int) -> None:
    logits = (2 * rng.normal(size=(rows, experts))).astype(np.float32)
    bias, bias_vl = (rng.normal(size=experts).astype(np.float32) for _ in range(2))
    is_image = (np.arange(rows) % 2).astype(np.int32)
    ids, weights = Gate.reference(logits, bias, bias_vl, is_image, live(rows), k, SCALE)
    assert ids.shape == weights.shape == (rows, k)
    assert weights.dtype == np.float32
    for row in range(rows):
        scores = [score(float(logit)) for logit in logits[row]]
        own = bias_vl if is_image[row] else bias
        biased = [s + float(b) for s, b in zip(scores, own, strict=True)]
        best = sorted(range(experts), key=lambda e: -biased[e])[:k]
        assert ids[row].tolist() == sorted(best)
        total = math.fsum(scores[e] for e in best) if k > 1 else 1.0
        assert_within(weights[row], [scores[e] / total * SCALE for e in sorted(best)], 1e-6)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    logits = np.zeros((1, 4), np.float32)
    bias = np.array([0, 5, 0, 9], np.float32)
    ids, weights = route(logits, bias, bias, np.zeros(1, np.int32), 2, SCALE)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.75, 0.75]]


def test_image_rows_have_their_own_bias() -> None:
    logits = np.zeros((2, 4), np.float32)
    text, image = np.array([1, 0, 0, 0], np.float32), np.array([0, 0, 0, 1], np.float32)
    ids, _ = route(logits, text, image, np.array([0, 1], np.int32), 1, SCALE)
    assert ids.tolist() == [[0], [3]]


def test_idle_rows_go_where_the_first_row_goes(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(5, 40)).astype(np.float32)
    bias = rng.normal(size=40).astype(np.float32)
    image, slot = np.array([1, 0, 0, 0, 0], np.int32), np.array([3, 0, 3, -1, -1], np.int32)
    ids, weights = Gate.reference(logits, bias, -bias, image, slot, 6, SCALE)
    all_ids, all_weights = Gate.reference(logits, bias, -bias, image, live(5), 6, SCALE)
    assert np.array_equal(ids, all_ids[[0, 1, 2, 0, 0]])
    assert np.array_equal(weights, all_weights[[0, 1, 2, 0, 0]])
    assert (all_ids[3:] != ids[3:]).any()


def test_a_single_expert_is_not_renormalised() -> None:
    logits = np.array([[25.0, -1.0]], np.float32)
    zero = np.zeros(2, np.float32)
    _, weights = route(logits, zero, zero, np.zeros(1, np.int32), 1, SCALE)
    assert_within(weights, [[5 * SCALE]], 1e-6)


@pytest.mark.parametrize("logit", [-1e30, -1000.0, -88.0, -20.0, 0.0, 20.0, 20.001, 1000.0, 1e30])
def test_any_logit_without_a_warning(logit: float) -> None:
    zero = np.zeros(1, np.float32)
    _, weights = route(np.full((1, 1), logit, np.float32), zero, zero, np.zeros(1, np.int32), 1, 1)
    want = score(float(np.float32(logit)))
    assert_within(weights, [[want]], 2.0**-22 * want)


def test_weights_of_hopeless_scores_stay_finite() -> None:
    """All scores zero: 0 / 1e-20."""
    zero = np.zeros(3, np.float32)
    _, weights = route(np.full((1, 3), -1e4, np.float32), zero, zero, np.zeros(1, np.int32), 2, 1.5)
    assert weights.tolist() == [[0.0, 0.0]]


@examples(200)
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=6, max_size=12),
    k=st.integers(1, 6),
)
def test_equal_scores_go_to_the_lower_expert(scores: list[float], k: int) -> None:
    zero = np.zeros(len(scores), np.float32)
    ids, _ = route(np.array([scores], np.float32), zero, zero, np.zeros(1, np.int32), k, SCALE)
    best = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]
    assert ids[0].tolist() == sorted(best)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    logits: F32 = rng.normal(size=(16, 384)).astype(np.float32)
    bias: F32 = bf16(rng.normal(size=384))
    image = (np.arange(16) % 5 == 0).astype(np.int32)
    assert_rows_alone(
        lambda rows, is_image, slot: Gate.reference(rows, bias, -bias, is_image, slot, 6, SCALE),
        [logits, image, live(16)],
        choice,
    )


OP = Gate(
    scratch("l", 6, 384, dtype="f32"),
    weight("b", 384, dtype="f32"),
    weight("bi", 384, dtype="f32"),
    io("im", 6),
    io("s", 6),
    scratch("ids", 6, 6, dtype="i32"),
    scratch("wt", 6, 6, dtype="f32"),
    6,
    SCALE,
)


def test_launch() -> None:
    assert_launch(OP, "gate", ("l", "b", "bi", "im", "s", "ids", "wt"), k=6, scale=SCALE)


@pytest.mark.parametrize(("experts", "k"), [(8, 3), (384, 6), (512, 64)])
def test_shared_memory_grows_with_experts(experts: int, k: int) -> None:
    logits = scratch("l", 6, experts, dtype="f32")
    assert replace(OP, logits=logits, k=k).geometry().shared == 4 * (2 * experts + k)


def test_cost_of_the_release() -> None:
    """Logits and choices of six rows, two biases; the projection is a linear's (model.md 4.11)."""
    assert_cost(OP, 6 * (384 * 4 + 2 * 4 + 6 * (4 + 4)) + 2 * 384 * 4)
