from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.compare import assert_within
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.tiny import tensors
from ultraflash.graphs.ops.rope_table import RopeTable

POSITIONS = np.array([0, 1, 2, 127, 128, 65535, 65536, 999_999, 1_048_575], np.int32)
FREQ = tensors("rope")["compressed.freq"]


@pytest.mark.parametrize("offset", [0, -1])
def test_the_angle_is_rounded_before_the_cosine(offset: int) -> None:
    cos, sin = RopeTable.reference(POSITIONS[1:], FREQ, offset)
    for row, position in enumerate(POSITIONS[1:].tolist()):
        for j, f in enumerate(FREQ):
            angle = float(np.float32(position + offset) * f)
            assert abs(cos[row, j] - math.cos(angle)) <= 2.0**-25
            assert abs(sin[row, j] - math.sin(angle)) <= 2.0**-25


def test_an_angle_in_double_would_be_another_one() -> None:
    """Near a million positions the rounding of the product is far above a cosine's own."""
    cos, _ = RopeTable.reference(POSITIONS[-1:], FREQ, 0)
    double = np.cos(float(POSITIONS[-1]) * FREQ.astype(np.float64))
    assert np.abs(cos[0] - double).max() > 1e-3


@pytest.mark.parametrize("table", ["plain", "compressed", "tiny_plain", "tiny_compressed"])
def test_against_the_authors(table: str) -> None:
    golden = tensors("rope")
    cos, sin = RopeTable.reference(golden["positions"], golden[f"{table}.freq"], 0)
    # An ulp of a float32 cosine: libraries round the last bit differently.
    assert_within(cos, golden[f"{table}.cos"], 2.0**-24)
    assert_within(sin, golden[f"{table}.sin"], 2.0**-24)


def test_an_idle_row_is_finite() -> None:
    cos, sin = RopeTable.reference(np.zeros(1, np.int32), FREQ, -1)
    assert np.isfinite(cos).all()
    assert np.isfinite(sin).all()


def test_types() -> None:
    cos, sin = RopeTable.reference(POSITIONS, FREQ, 0)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (len(POSITIONS), len(FREQ))


@every_choice
def test_rows_stand_alone(choice: Choice) -> None:
    assert_rows_alone(lambda p: RopeTable.reference(p, FREQ, -1), [POSITIONS], choice)


OP = RopeTable(
    io("p", 3),
    weight("f", 8, dtype="f32"),
    scratch("c", 3, 8, dtype="f32"),
    scratch("s", 3, 8, dtype="f32"),
    -1,
)


def test_launch() -> None:
    assert_launch(OP, "rope_table", ("p", "f", "c", "s"), offset=-1)


def test_cost() -> None:
    assert_cost(OP, 4 * (3 + 8 + 3 * 8 + 3 * 8))
