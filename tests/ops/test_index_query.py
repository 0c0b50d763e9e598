from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_is_bf16, assert_same_bits
from helpers.formats import quantise
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.values import ROWS, activations, angles
from ultraflash.graphs.ops.index_query import IndexQuery
from ultraflash.graphs.ops.rope import rotate


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "dim", "pairs"), [(1, 32, 8), (3, 64, 8), (32, 128, 32)])
def test_qmx4_of_the_turned_heads(
    rng: np.random.Generator, rows: int, heads: int, dim: int, pairs: int
) -> None:
    x, (cos, sin) = activations(rng, rows, heads * dim, spread=6), angles(rng, rows, pairs)
    y = IndexQuery.reference(x, cos, sin, heads)
    assert_is_bf16(y)
    turned = rotate(x.reshape(rows, heads, dim), cos, sin)
    assert_same_bits(y, quantise("qmx4", turned)[2].astype(np.float32))


def test_sixteen_levels_a_group(rng: np.random.Generator) -> None:
    x, (cos, sin) = activations(rng, 1, 64), angles(rng, 1, 8)
    for group in IndexQuery.reference(x, cos, sin, 1).reshape(2, 32):
        assert len(np.unique(np.abs(group))) <= 8


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [activations(rng, 9, 4 * 64), *angles(rng, 9, 8)]
    assert_rows_alone(lambda x, c, s: IndexQuery.reference(x, c, s, 4), rows, choice)


OP = IndexQuery(
    scratch("x", 3, 128),
    scratch("c", 3, 8, dtype="f32"),
    scratch("s", 3, 8, dtype="f32"),
    scratch("y", 3, 4, 32),
    4,
)


def test_launch() -> None:
    assert_launch(OP, "index_query", ("x", "c", "s", "y"), heads=4)


def test_cost() -> None:
    assert_cost(OP, 3 * (2 * 128 + 2 * 4 * 8 + 2 * 128))
