from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.values import activations, dense_weight
from ultraflash.graphs.ops.confidence import Confidence

UNTOUCHED = np.float32(77)


def run(h: F32, me: F32, w: F64, index: int) -> F32:
    """All columns after the call; h: [S, B, D]."""
    y = np.full(h.shape[:2], UNTOUCHED, np.float32)
    result = Confidence.reference(h.reshape(-1, h.shape[2]), me, w, y, index)
    assert result is None  # y is changed in place
    return y


@pytest.mark.parametrize("sequences", [1, 2, 3, 16])
@pytest.mark.parametrize("block", [1, 5, 7])
def test_against_exact_sums(rng: np.random.Generator, sequences: int, block: int) -> None:
    """[h_i ; me_i] . w, h as it is: rows of other drafts and other columns do not take part."""
    h, me = activations(rng, sequences, block, 96), activations(rng, sequences, 32)
    w = dense_weight(rng, 1, 96 + 32)
    for index in range(block):
        y = run(h, me, w, index)
        assert (np.delete(y, index, axis=1) == UNTOUCHED).all()
        for s in range(sequences):
            terms = np.concatenate([h[s, index], me[s]]).astype(np.float64) * w[0]
            slack = 128 * 2.0**-53 * np.abs(terms).sum()
            assert_rounded(y[s, index, None], [math.fsum(terms)], "f32", slack)


def test_the_stream_comes_before_the_token() -> None:
    h, me = np.ones((1, 1, 4), np.float32), np.full((1, 2), 8, np.float32)
    w = np.array([[1.0, 1, 1, 1, 10, 10]])
    assert run(h, me, w, 0).tolist() == [[164.0]]


def test_no_sigmoid_and_no_norm() -> None:
    h, me = np.full((1, 2, 4), 1000, np.float32), np.zeros((1, 2), np.float32)
    w = np.ones((1, 6))
    assert run(h, me, w, 1)[0, 1] == 4000
    assert run(h * np.float32(2), me, w, 1)[0, 1] == 8000


def test_other_drafts_do_not_matter(rng: np.random.Generator) -> None:
    """c_i must not know what comes behind draft i."""
    h, me, w = activations(rng, 2, 5, 64), activations(rng, 2, 32), dense_weight(rng, 1, 96)
    want = run(h, me, w, 2)
    h[:, [0, 1, 3, 4]] = np.nan
    assert_same_bits(run(h, me, w, 2), want)


@every_choice
def test_sequences_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    h, me, w = activations(rng, 9, 5, 256), activations(rng, 9, 32), dense_weight(rng, 1, 288)
    for index in (0, 4):
        assert_rows_alone(lambda a, b, i=index: run(a, b, w, i), [h, me], choice)


OP = Confidence(
    scratch("h", 2 * 5, 5120),
    scratch("me", 2, 256),
    weight("w", 1, 5376),
    io("y", 2, 5, dtype="f32"),
    3,
)


def test_launch() -> None:
    assert_launch(OP, "confidence", ("h", "me", "w", "y"), index=3)


def test_cost_counts_one_draft_of_each_sequence() -> None:
    """Of h and y only what belongs to draft `index`; the head's 5376 weights once."""
    assert_cost(OP, 2 * (2 * 5376 + 4) + 2 * 5376, 2 * 2 * 5376)
