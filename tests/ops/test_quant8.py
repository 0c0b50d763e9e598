from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.formats import bf16, quantise
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.tiny import golden, tensors
from helpers.values import ROWS, activations
from ultraflash.graphs.ops.quant8 import Quant8


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(32,), (96,), (3, 64), (6, 2, 32)])
def test_against_the_definition(
    rng: np.random.Generator, rows: int, shape: tuple[int, ...]
) -> None:
    x = activations(rng, rows, *shape, spread=8)
    assert_same_bits(Quant8.reference(x), quantise("q8", x)[2].astype(np.float32))


def test_against_the_authors() -> None:
    x, want = tensors("quant")["x"], tensors("quant")["q8.deq"]
    names = golden().json("meta.json")["quant_rows"]
    finite = [i for i, name in enumerate(names) if name != "bf16_max"]  # that one overflows
    assert_same_bits(Quant8.reference(x[finite]), want[finite])


def test_twice_is_once(rng: np.random.Generator) -> None:
    once = Quant8.reference(activations(rng, 8, 96))
    assert_same_bits(Quant8.reference(once), once)


def test_a_group_at_the_edge_of_a_scale() -> None:
    """448 fits under scale 1, more needs 2; a group below the floor has scale 2^-22."""
    x = bf16(np.array([[448.0] * 32, [452.0] * 32, [1e-6] * 32]))
    y = Quant8.reference(x)
    assert y[0, 0] == 448
    assert y[1, 0] == 448  # 226 in units of 2 lies nearest to 224
    assert y[2, 0] == 4 * 2.0**-22  # 1e-6 * 2^22 = 4.19


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    assert_rows_alone(Quant8.reference, [activations(rng, 9, 2, 64)], choice)


OP = Quant8(scratch("x", 3, 2, 64), scratch("y", 3, 2, 64))


def test_launch() -> None:
    assert_launch(OP, "quant8", ("x", "y"))


def test_cost() -> None:
    assert_cost(OP, 2 * (3 * 2 * 64) * 2)
