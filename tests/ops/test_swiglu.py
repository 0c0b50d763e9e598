from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64, bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.values import ROWS, activations
from ultraflash.graphs.numerics import fake_q8, to_bf16
from ultraflash.graphs.ops.swiglu import Swiglu, swiglu

LIMIT = 10.0


def exact(gate: F32, up: F32, limit: float = LIMIT) -> F64:
    g = np.minimum(gate.astype(np.float64), limit)
    y: F64 = g / (1 + np.exp(-g)) * np.clip(up.astype(np.float64), -limit, limit)
    return y


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [32, 96, 2304])
def test_against_float64(rng: np.random.Generator, rows: int, width: int) -> None:
    gate, up = activations(rng, rows, width), activations(rng, rows, width)
    want = exact(gate, up)
    # float32 inside: an exponential, a sum, a division and two products; below -88.7 the gate is 0.
    error = 2.0**-20 * np.abs(want) + 1e-35
    assert_rounded(to_bf16(swiglu(gate, up, LIMIT)), want, "bf16", error)


def test_where_the_clamps_act() -> None:
    """gate is cut above only, up on both sides."""
    gate = bf16(np.array([[12.0, 12.0, 9.5, -12.0, -12.0, 10.0]]))
    up = bf16(np.array([[3.0, 20.0, -20.0, -20.0, 20.0, -10.0]]))
    y = to_bf16(swiglu(gate, up, LIMIT))
    s10 = 10 / (1 + np.exp(-10.0))
    s95 = 9.5 / (1 + np.exp(-9.5))
    low = -12 / (1 + np.exp(12.0))
    want = [s10 * 3, s10 * 10, s95 * -10, low * -10, low * 10, s10 * -10]
    assert_rounded(y, [want], "bf16", 2.0**-20 * np.abs([want]))


@pytest.mark.parametrize("gate", [-3e38, -1e4, -100.0, -89.0, -0.0, 0.0])
def test_far_negative_gates_close_without_a_warning(gate: float) -> None:
    y = swiglu(bf16(np.full((1, 32), gate)), bf16(np.ones((1, 32))), LIMIT)
    assert np.abs(y).max() <= 1e-36


def test_the_product_is_rounded_and_quantised(rng: np.random.Generator) -> None:
    gate, up = activations(rng, 5, 96), activations(rng, 5, 96)
    want = fake_q8(to_bf16(swiglu(gate, up, LIMIT)))
    assert_same_bits(Swiglu.reference(gate, up, LIMIT), want)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [activations(rng, 9, 2304), activations(rng, 9, 2304)]
    assert_rows_alone(lambda g, u: Swiglu.reference(g, u, LIMIT), rows, choice)


OP = Swiglu(scratch("g", 3, 64), scratch("u", 3, 64), scratch("y", 3, 64), LIMIT)


def test_launch() -> None:
    assert_launch(OP, "swiglu", ("g", "u", "y"), limit=LIMIT)


def test_cost() -> None:
    assert_cost(OP, 3 * 2 * 3 * 64)
