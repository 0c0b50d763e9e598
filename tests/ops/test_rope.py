from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import bf16_ulp
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.tiny import tensors
from helpers.values import ROWS, activations, angles, turned
from ultraflash.graphs.ops.rope import Rope, rotate


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "dim", "pairs"), [(1, 32, 8), (3, 64, 8), (8, 16, 8), (2, 512, 32)]
)
def test_against_complex_numbers(
    rng: np.random.Generator, rows: int, heads: int, dim: int, pairs: int
) -> None:
    x, (cos, sin) = activations(rng, rows, heads * dim), angles(rng, rows, pairs)
    y = Rope.reference(x, cos, sin, heads)
    split = x.reshape(rows, heads, dim)
    size = np.abs(split)
    tail = size[..., -2 * pairs :].reshape(rows, heads, pairs, 2)
    size[..., -2 * pairs :] = np.repeat(tail.sum(axis=-1), 2, axis=-1)
    # float32 inside: two products and their sum.
    assert_rounded(y, turned(split, cos, sin), "bf16", error=2 * 2.0**-24 * size)
    assert_same_bits(y[..., : -2 * pairs], split[..., : -2 * pairs])


@pytest.mark.parametrize("table", ["plain", "compressed", "tiny_plain", "tiny_compressed"])
@pytest.mark.parametrize(("inverse", "name"), [(False, "rot"), (True, "rot_inverse")])
def test_against_the_authors(table: str, inverse: bool, name: str) -> None:
    golden = tensors("rope")
    cos, sin = golden[f"{table}.cos"], golden[f"{table}.sin"]
    y = rotate(golden[f"{table}.x"], cos, -sin if inverse else sin)
    want = golden[f"{table}.{name}"]
    # One ulp: the authors multiply complex numbers, whose order of rounding is the library's.
    assert (np.abs(y - want) <= bf16_ulp(want)).all()


def test_a_quarter_turn_moves_even_to_odd() -> None:
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 8)
    y = rotate(x, np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    assert y.tolist() == [[1, 2, 3, 4, -6, 5, -8, 7]]


def test_turning_back_gives_the_same_row(rng: np.random.Generator) -> None:
    x, (cos, sin) = activations(rng, 5, 2, 32, spread=0), angles(rng, 5, 8)
    back = rotate(rotate(x, cos, sin), cos, -sin)
    assert np.abs(back - x).max() <= 2.0**-7 * np.abs(x).max()


def test_input_is_left_alone(rng: np.random.Generator) -> None:
    x, (cos, sin) = activations(rng, 3, 64), angles(rng, 3, 8)
    before = x.copy()
    Rope.reference(x, cos, sin, 2)
    assert_same_bits(x, before)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    x, (cos, sin) = activations(rng, 9, 3 * 32), angles(rng, 9, 8)
    assert_rows_alone(lambda a, c, s: Rope.reference(a, c, s, 3), [x, cos, sin], choice)


OP = Rope(
    scratch("x", 3, 96),
    scratch("c", 3, 8, dtype="f32"),
    scratch("s", 3, 8, dtype="f32"),
    scratch("y", 3, 3, 32),
    3,
)


def test_launch() -> None:
    assert_launch(OP, "rope", ("x", "c", "s", "y"), heads=3)


def test_cost() -> None:
    assert_cost(OP, 3 * (2 * 96 + 4 * 8 + 4 * 8 + 2 * 96))
