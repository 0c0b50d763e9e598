from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.values import ROWS, activations
from ultraflash.graphs.ops.stream_mean import StreamMean


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_mean_of_the_copies(rng: np.random.Generator, rows: int, copies: int) -> None:
    x = activations(rng, rows, copies, 96)
    y = StreamMean.reference(x, None)
    wide = x.astype(np.float64)
    slack = copies * 2.0**-24 * np.abs(wide).sum(axis=1) / copies
    assert_rounded(y, wide.mean(axis=1), "bf16", slack)


@pytest.mark.parametrize("targets", [1, 2])
def test_earlier_targets_stand_in_front_as_they_are(rng: np.random.Generator, targets: int) -> None:
    """Row order of `tap`: target layers ascending (model.md 6.2)."""
    x, before = activations(rng, 5, 4, 32), activations(rng, 5, targets * 32)
    y = StreamMean.reference(x, before)
    assert y.shape == (5, (targets + 1) * 32)
    assert_same_bits(y[:, : targets * 32], before)
    assert_same_bits(y[:, targets * 32 :], StreamMean.reference(x, None))


def test_copies_are_added_in_their_order_in_float32() -> None:
    big = np.float32(2.0**24)
    x = np.array([[[big, big], [1, -big], [-big, 1], [0, 0]]], np.float32)
    assert StreamMean.reference(x, None).tolist() == [[0.0, 0.25]]


def test_one_rounding_behind_the_division() -> None:
    """1 + 2^-8 is a tie of bf16, and what a division by 3 leaves is no bf16 value."""
    tie: F32 = np.array([[[1.0], [1 + 2.0**-7]]], np.float32)
    assert StreamMean.reference(tie, None).tolist() == [[1.0]]
    thirds: F32 = np.array([[[1.0], [0.0], [0.0]]], np.float32)
    assert StreamMean.reference(thirds, None).tolist() == [[171 / 512]]


def test_the_streams_are_left_alone(rng: np.random.Generator) -> None:
    """They go on into the layer."""
    x, before = activations(rng, 3, 4, 32), activations(rng, 3, 32)
    copies = x.copy(), before.copy()
    y = StreamMean.reference(x, before)
    assert_same_bits(x, copies[0])
    assert_same_bits(before, copies[1])
    assert not np.shares_memory(y, x)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [activations(rng, 9, 4, 64), activations(rng, 9, 64)]
    assert_rows_alone(StreamMean.reference, rows, choice)


FIRST = StreamMean(scratch("x", 6, 4, 5120), None, scratch("y", 6, 5120))
LAST = StreamMean(scratch("x", 6, 4, 5120), scratch("b", 6, 10240), scratch("y", 6, 15360))


def test_launch() -> None:
    assert_launch(FIRST, "stream_mean", ("x", "y"), before=None)
    assert_launch(LAST, "stream_mean", ("x", "b", "y"))


def test_cost() -> None:
    assert_cost(FIRST, 6 * 2 * (4 + 1) * 5120)
    assert_cost(LAST, 6 * 2 * (4 + 2 + 3) * 5120)
