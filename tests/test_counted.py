"""Counted random values on the host; tests/gpu compares the device with them."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import counted
from helpers.chi_square import fits
from helpers.counted import Recipe, bits, choices, seed_of
from helpers.formats import E4M3_MAGNITUDES, bf16, decode
from ultraflash.graphs.numerics import bf16_from_bits

COUNT = 65_536
EVERYWHERE = np.arange(COUNT)
SEED = seed_of("a test")
RECIPES = [
    counted.codes8(),
    counted.codes4(),
    counted.bytes_between(117, 123),
    counted.normal16(1.5),
    counted.normal32(0.02),
    counted.uniform16(-2, 3),
    counted.uniform32(0.01, 1.5),
    counted.activations8(117, 122),
]


def test_bits_are_splitmix64() -> None:
    """Its published sequences for two seeds."""
    assert bits(np.uint64(0), np.arange(3, dtype=np.uint64)).tolist() == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip
    assert bits(np.uint64(1234567), np.arange(3, dtype=np.uint64)).tolist() == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda r: f"{r.element.__name__} {r.dtype.__name__}"
)
def test_an_element_is_the_same_alone_and_among_others(recipe: Recipe) -> None:
    whole = recipe.at(SEED, EVERYWHERE)
    assert whole.dtype == recipe.dtype
    for index in (0, 31, 32, 40_000, COUNT - 1):
        assert recipe.at(SEED, index).tobytes() == whole[index].tobytes()
    assert (recipe.at(seed_of("another"), EVERYWHERE) != whole).mean() > 0.5
    assert len(recipe.at(SEED, (1 << 40) + EVERYWHERE)) == COUNT, "far beyond 32 bits"


def test_codes_lack_the_two_nans_and_nothing_else() -> None:
    found = np.unique(counted.codes8().at(SEED, EVERYWHERE))
    assert found.tolist() == [code for code in range(256) if code % 128 != 127]
    assert len(np.unique(counted.codes4().at(SEED, EVERYWHERE))) == 256


def test_scales_lie_in_their_range_and_are_alike() -> None:
    found, counts = np.unique(
        counted.bytes_between(117, 123).at(SEED, EVERYWHERE), return_counts=True
    )
    assert found.tolist() == [117, 118, 119, 120, 121, 122]
    assert fits(counts, np.full(6, 1 / 6))


def test_a_bell_is_nearly_normal_and_rounds_to_bf16() -> None:
    wide = counted.normal32(1.5).at(SEED, EVERYWHERE)
    assert abs(wide.mean()) < 0.02
    assert abs(wide.std() / 1.5 - 1) < 0.01
    assert abs((np.abs(wide) < 1.5).mean() - 0.68) < 0.02
    narrow = bf16_from_bits(counted.normal16(1.5).at(SEED, EVERYWHERE))
    assert narrow.tobytes() == bf16(wide).tobytes()


def test_uniform_values_fill_their_range() -> None:
    found = counted.uniform32(-2, 3).at(SEED, EVERYWHERE)
    assert (found.min() >= -2, found.max() <= 3) == (True, True)
    counts, _ = np.histogram(found, 50, (-2, 3))
    assert fits(counts, np.full(50, 1 / 50))


def test_quantised_activations_are_codes_times_a_power_of_two_of_their_group() -> None:
    found = bf16_from_bits(counted.activations8(117, 122).at(SEED, EVERYWHERE)).reshape(-1, 32)
    codes = counted.codes8().at(SEED, EVERYWHERE).reshape(-1, 32)
    values = decode(codes, E4M3_MAGNITUDES)
    peak = np.abs(values).argmax(axis=1)[:, None]
    scale = np.take_along_axis(found, peak, 1) / np.take_along_axis(values, peak, 1)
    assert np.unique(scale).tolist() == [2.0**n for n in range(-10, -5)]
    assert (found == values * scale).all()


@pytest.mark.parametrize(("rows", "most", "count"), [(50, 6, 384), (7, 9, 4), (3, 128, 128)])
def test_choices_ascend_without_repetition(rows: int, most: int, count: int) -> None:
    found = choices(SEED, rows, most, count)
    assert found.shape == (rows, most)
    few = min(most, count)
    assert (np.diff(found[:, :few]) > 0).all()
    assert (found[:, 0].min() >= 0, found[:, :few].max() < count) == (True, True)
    assert (found[:, few:] == -1).all()


def test_every_set_is_chosen_as_often() -> None:
    found = choices(SEED, 30_000, 2, 5)
    counts = np.unique(found[:, 0] * 5 + found[:, 1], return_counts=True)[1]
    assert fits(counts, np.full(10, 1 / 10))
