"""Rotary frequencies: check values of model.md 3.4 and the authors' tables to the bit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.golden_plans import tiny_model
from helpers.tiny import tensors
from ultraflash.graphs.release import release_model
from ultraflash.graphs.rotary import TABLES, frequencies, plain_frequencies


@pytest.mark.parametrize("table", ["plain", "compressed"])
def test_tables_of_the_release_to_the_bit(table: str) -> None:
    """One ulp of the second frequency is 0.06 rad at a million positions."""
    assert_same_bits(frequencies(release_model())[table], tensors("rope")[f"{table}.freq"])


@pytest.mark.parametrize("table", ["plain", "compressed"])
def test_tables_of_the_tiny_model_to_the_bit(table: str) -> None:
    assert_same_bits(frequencies(tiny_model())[table], tensors("rope")[f"tiny_{table}.freq"])


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        (0, 1.0),
        (1, 0.687656045),
        (2, 0.472870797),
        (15, 0.00363553851),
        (16, 0.00226562493),
        (20, 2.96977785e-4),
        (24, 1.95312532e-5),
        (25, 5.37231244e-6),
        (31, 5.6805294e-7),
    ],
)
def test_compressed_check_values(pair: int, value: float) -> None:
    assert frequencies(release_model())["compressed"][pair] == np.float32(value)


def test_compressed_is_the_blend_of_the_document() -> None:
    """Low pairs kept up to 15, divided by 16 from 25 on, linear between, in float64."""
    got = frequencies(release_model())["compressed"].astype(np.float64)
    for j in range(32):
        base = 160000 ** (-2 * j / 64)
        keep = 1 - min(max((j - 15) / (25 - 15), 0), 1)
        assert got[j] == pytest.approx(base / 16 * (1 - keep) + base * keep, rel=3e-7)


def test_plain_has_no_yarn() -> None:
    got = frequencies(release_model())["plain"].astype(np.float64)
    for j in range(32):
        assert got[j] == pytest.approx(10000 ** (-2 * j / 64), rel=2e-7)


def test_the_context_of_the_release_decides_the_edges() -> None:
    """c(32) = 15.453, c(1) = 24.708 (model.md 3.4)."""

    def c(turns: float) -> float:
        return 64 * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(160000))

    assert c(32) == pytest.approx(15.453, abs=1e-3)
    assert c(1) == pytest.approx(24.708, abs=1e-3)


def test_a_factor_of_one_changes_nothing() -> None:
    model = replace(release_model(), yarn_factor=1.0)
    base = plain_frequencies(160000, 64)
    assert np.abs(frequencies(model)["compressed"] / base - 1).max() < 2.0**-22


def test_an_extreme_context_keeps_or_stretches_all() -> None:
    """Edges beyond the pairs are cut, and equal edges divide by nothing."""
    for original in (7, 2**40):
        table = frequencies(replace(release_model(), yarn_original=original))["compressed"]
        assert np.isfinite(table).all()
        assert (np.diff(table) < 0).all()


def test_names_types_and_lengths() -> None:
    for model in (release_model(), tiny_model()):
        tables = frequencies(model)
        assert tuple(tables) == TABLES
        for table in tables.values():
            assert table.dtype == np.float32
            assert table.shape == (model.rope_dim // 2,)
