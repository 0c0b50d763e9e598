from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64, bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import ROWS, activations
from ultraflash.graphs.numerics import fake_q8
from ultraflash.graphs.ops.rms_norm import RmsNorm

EPS = 1e-20


def exact(x: F32, w: F32, eps: float) -> F64:
    wide = x.astype(np.float64)
    y: F64 = w * wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
    return y


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [32, 64, 96, 5120])
def test_against_float64(rng: np.random.Generator, rows: int, size: int) -> None:
    x, w = activations(rng, rows, size), activations(rng, size)
    want = exact(x, w, EPS)
    # float32 inside: mean, root, reciprocal and two products, each half an ulp.
    assert_rounded(RmsNorm.reference(x, w, EPS), want, "bf16", error=4 * 2.0**-24 * np.abs(want))


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6, 1e15])
def test_any_magnitude(rng: np.random.Generator, size: float) -> None:
    """1e-20 is a normal fp32 number: at 1e-6 it does not show, at 1e-12 it damps."""
    x, w = bf16(rng.normal(size=(3, 64)) * size), bf16(np.ones(64))
    want = exact(x, w, EPS)
    assert_rounded(RmsNorm.reference(x, w, EPS), want, "bf16", error=4 * 2.0**-24 * np.abs(want))


def test_a_zero_row_stays_zero() -> None:
    x, w = np.zeros((2, 32), np.float32), np.ones(32, np.float32)
    assert_same_bits(RmsNorm.reference(x, w, EPS), x)


def test_an_eps_that_matters(rng: np.random.Generator) -> None:
    x, w = activations(rng, 4, 32), activations(rng, 32)
    want = exact(x, w, 0.5)
    assert_rounded(RmsNorm.reference(x, w, 0.5), want, "bf16", error=4 * 2.0**-24 * np.abs(want))


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    x, w = activations(rng, 17, 5120), activations(rng, 5120)
    assert_rows_alone(lambda rows: RmsNorm.reference(rows, w, EPS), [x], choice)


def test_its_q8(rng: np.random.Generator) -> None:
    x, w = activations(rng, 4, 96), activations(rng, 96)
    normed = RmsNorm.reference(x, w, EPS)
    assert_same_bits(RmsNorm.reference(x, w, EPS, q8=True), fake_q8(normed))


OP = RmsNorm(scratch("x", 3, 64), weight("w", 64), scratch("y", 3, 64), EPS)


def test_launch() -> None:
    assert_launch(OP, "rms_norm", ("x", "w", "y"), eps=EPS, q8=False)


def test_cost() -> None:
    assert_cost(OP, 2 * (3 * 64 + 64 + 3 * 64))
