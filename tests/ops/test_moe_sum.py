from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded
from helpers.formats import bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.values import ROWS, activations
from ultraflash.graphs.ops.moe_sum import MoeSum


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("rounded", [True, False])
def test_against_float64(rng: np.random.Generator, rows: int, k: int, rounded: bool) -> None:
    routed, shared = activations(rng, rows, k, 96), activations(rng, rows, 96)
    wide = np.concatenate([routed, shared[:, None]], axis=1).astype(np.float64)
    error = k * 2.0**-24 * np.abs(wide).sum(axis=1)  # k float32 additions
    y = MoeSum.reference(routed, shared, rounded)
    assert_rounded(y, wide.sum(axis=1), "bf16" if rounded else "f32", error)


def test_experts_first_in_order_then_the_shared_one() -> None:
    """float32 forgets the 1 beside 2^24, unless the big ones have met before."""
    big = 2.0**25
    routed = np.array([[[big, 1, 1], [1, big, big], [-big, -big, 1]]], np.float32)
    shared = np.array([[1, 1, -big]], np.float32)
    y = MoeSum.reference(routed, shared, False)
    assert y.tolist() == [[1.0, 2.0 - 1.0, 0.0]]


def test_ties_of_the_final_rounding_go_to_even() -> None:
    routed = bf16(np.array([[[1.0], [2.0**-8]]]))
    assert MoeSum.reference(routed, np.zeros((1, 1), np.float32), True).tolist() == [[1.0]]


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [activations(rng, 9, 6, 256), activations(rng, 9, 256)]
    assert_rows_alone(lambda r, s: MoeSum.reference(r, s, True), rows, choice)


def test_input_is_left_alone(rng: np.random.Generator) -> None:
    routed, shared = activations(rng, 3, 2, 32), activations(rng, 3, 32)
    before = routed.copy()
    MoeSum.reference(routed, shared, True)
    assert np.array_equal(routed, before)


OP = MoeSum(scratch("r", 3, 6, 64), scratch("s", 3, 64), scratch("y", 3, 64), True)


def test_launch() -> None:
    assert_launch(OP, "moe_sum", ("r", "s", "y"), rounded=True)


def test_cost() -> None:
    assert_cost(OP, 2 * 3 * 64 * (6 + 1 + 1))
