from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import activations, fp4_weight, through_q8
from ultraflash.graphs.ops.experts_down import ExpertsDown


def inputs(
    rng: np.random.Generator, rows: int, experts: int, k: int, width: int, hidden: int
) -> tuple[F32, np.ndarray, F64]:
    z = through_q8(activations(rng, rows, k, width, spread=1))
    ids = np.array([np.sort(rng.choice(experts, k, replace=False)) for _ in range(rows)], np.int32)
    return z, ids, fp4_weight(rng, experts, hidden, width)


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("experts", "k"), [(8, 3), (3, 3), (8, 1)])
def test_against_exact_sums(
    rng: np.random.Generator, rows: int, experts: int, k: int, rounded: bool
) -> None:
    z, ids, w2 = inputs(rng, rows, experts, k, 64, 33)
    y = ExpertsDown.reference(z, ids, w2, rounded)
    assert y.shape == (rows, k, 33)
    for row in range(rows):
        for place, expert in enumerate(ids[row]):
            wide = z[row, place].astype(np.float64)
            want = np.array([math.fsum(wide * line) for line in w2[expert]])
            # float64 sums of 64 products: far below the rounding, unless everything cancels.
            slack = 64 * 2.0**-53 * (np.abs(w2[expert]) @ np.abs(wide))
            assert_rounded(y[row, place], want, "bf16" if rounded else "f32", slack)


def test_rows_that_share_an_expert(rng: np.random.Generator) -> None:
    z, _, w2 = inputs(rng, 6, 4, 2, 32, 40)
    ids = np.tile(np.array([1, 3], np.int32), (6, 1))
    y = ExpertsDown.reference(z, ids, w2, True)
    for row in range(6):
        alone = ExpertsDown.reference(z[row : row + 1], ids[:1], w2, True)
        assert_same_bits(y[row : row + 1], alone)


def test_widths_of_ranks_add_up(rng: np.random.Generator) -> None:
    """Each rank holds columns of w2; parts are fp32 and not rounded to bf16."""
    z, ids, w2 = inputs(rng, 4, 8, 3, 128, 32)
    halves = (slice(0, 64), slice(64, 128))
    parts = [
        ExpertsDown.reference(z[..., h], ids, np.ascontiguousarray(w2[..., h]), False)
        for h in halves
    ]
    whole = ExpertsDown.reference(z, ids, w2, False)
    limit = 2.0**-23 * np.abs(parts).max()
    assert np.abs(parts[0].astype(np.float64) + parts[1] - whole).max() <= limit


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    z, ids, w2 = inputs(rng, 16, 8, 3, 128, 256)
    assert_rows_alone(lambda a, b: ExpertsDown.reference(a, b, w2, True), [z, ids], choice)


def op(rows: int) -> ExpertsDown:
    """The release's."""
    return ExpertsDown(
        scratch("z", rows, 6, 2304),
        scratch("i", rows, 6, dtype="i32"),
        weight("w2", 384, 5120, 2304, dtype="fp4"),
        scratch("y", rows, 6, 5120),
        True,
    )


def test_launch() -> None:
    assert_launch(op(3), "experts_down", ("z", "i", "w2", "y"), rounded=True)


@pytest.mark.parametrize(("rows", "distinct"), [(1, 6), (7, 42), (100, 384)])
def test_cost_of_the_release(rows: int, distinct: int) -> None:
    """An expert's [5120, 1152] bytes and [5120, 72] scales; six experts a row, never over 384."""
    matrix = 5120 * 1152 + 5120 * 72
    nbytes = distinct * matrix + 2 * rows * 6 * (2304 + 5120)
    assert_cost(op(rows), nbytes, 2 * rows * 6 * 2304 * 5120)
