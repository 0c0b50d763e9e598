from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.formats import dequantise, quantise
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import ROWS, activations, angles, turned
from ultraflash.graphs.numerics import rms_norm
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.ops.window_kv import WindowKv

EPS = 1e-20


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dim", "pairs"), [(32, 8), (64, 8), (96, 4), (512, 32)])
def test_codes_and_scales_of_the_turned_row(
    rng: np.random.Generator, rows: int, dim: int, pairs: int
) -> None:
    x, (cos, sin) = activations(rng, rows, dim, spread=6), angles(rng, rows, pairs)
    norm = activations(rng, dim)
    codes, scales = WindowKv.reference(x, norm, cos, sin, EPS)
    # Norm and rotation are compared on their own (test_rms_norm.py, test_rope.py); given their
    # bf16 values, bytes are exact.
    normed = rms_norm(x, norm, EPS)
    want_codes, want_scales, _ = quantise("q8", rotate(normed, cos, sin))
    assert_same_bits(codes, want_codes)
    assert_same_bits(scales, want_scales)


def test_it_rotates_before_it_quantises(rng: np.random.Generator) -> None:
    """Decoded, a row is the turned one within a step of E4M3: 2^-4 of a value, 2^-10 of a scale."""
    x, (cos, sin) = activations(rng, 8, 64), angles(rng, 8, 8)
    norm = activations(rng, 64)
    codes, scales = WindowKv.reference(x, norm, cos, sin, EPS)
    normed = rms_norm(x, norm, EPS)
    got, want = dequantise("q8", codes, scales), turned(normed, cos, sin)
    step = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=-1)
    assert (np.abs(got - want) <= 2.0**-4 * 1.02 * np.abs(want) + 2.0**-10 * step).all()


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [activations(rng, 9, 64), *angles(rng, 9, 8)]
    norm = activations(rng, 64)
    assert_rows_alone(lambda x, c, s: WindowKv.reference(x, norm, c, s, EPS), rows, choice)


OP = WindowKv(
    scratch("x", 3, 512),
    weight("w", 512),
    scratch("c", 3, 32, dtype="f32"),
    scratch("s", 3, 32, dtype="f32"),
    scratch("codes", 3, 512, dtype="u8"),
    scratch("scales", 3, 16, dtype="u8"),
    EPS,
)


def test_launch() -> None:
    assert_launch(OP, "window_kv", ("x", "w", "c", "s", "codes", "scales"), eps=EPS)


def test_cost() -> None:
    """528 bytes a row (model.md 5.2) from a bf16 row and two halves of angles."""
    assert_cost(OP, 3 * (2 * 512 + 2 * 4 * 32 + 528) + 2 * 512)
