"""Philox4x32-10 against the published vectors of Random123, and the numbers drawn from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.compare import Array, assert_same_bits
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.properties import examples
from helpers.statistics import fits
from ultraflash.graphs.philox import Purpose, philox, uniform

# kat_vectors of Random123, lines "philox4x32 10": counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def rounds(counter: list[int], key: int, count: int = 10) -> list[int]:
    """The paper's round function in Python integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key % 2**32, key >> 32
    for _ in range(count):
        first, second = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1 = (second >> 32) ^ x1 ^ k0, second % 2**32
        x2, x3 = (first >> 32) ^ x3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [x0, x1, x2, x3]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    low, high = words(key)
    got = philox(np.array([low | high << 32], np.uint64), np.array([words(counter)], np.uint32))
    assert got.dtype == np.uint32
    assert got.tolist() == [words(result)]


def test_known_answers_side_by_side() -> None:
    keys = np.array([low | high << 32 for low, high in (words(k) for _, k, _ in KNOWN)], np.uint64)
    counters = np.array([words(c) for c, _, _ in KNOWN], np.uint32)
    assert philox(keys, counters).tolist() == [words(r) for _, _, r in KNOWN]


@examples(200)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), st.integers(0, 2**64 - 1))
def test_against_python_integers(counter: list[int], key: int) -> None:
    got = philox(np.array([key], np.uint64), np.array([counter], np.uint32))
    assert got.tolist() == [rounds(counter, key)]


def test_the_counter_is_position_step_purpose_zero() -> None:
    seed, position, step = 0x123456789ABCDEF0, 1_048_575, 77
    for purpose in Purpose:
        got = uniform(
            np.array([seed], np.uint64),
            np.array([position], np.int32),
            np.array([step], np.int32),
            purpose,
        )
        word = rounds([position, step, int(purpose), 0], seed)[0]
        assert got.tolist() == [(word + 0.5) / 2**32]


def test_purposes_are_distinct() -> None:
    assert len({int(p) for p in Purpose}) == len(Purpose)


def test_numbers_lie_strictly_inside_0_and_1() -> None:
    """(0 + 1/2) / 2^32 and (2^32 - 1/2) / 2^32 are the extremes, exact in float64."""
    assert 0 < 0.5 * 2.0**-32
    assert (2**32 - 0.5) * 2.0**-32 < 1
    count = 10_000
    zero = np.zeros(count, np.int32)
    u = uniform(np.arange(count, dtype=np.uint64), zero, zero, Purpose.RESIDUAL)
    assert u.dtype == np.float64
    assert ((u > 0) & (u < 1)).all()


@pytest.mark.parametrize("vary", ["seed", "position", "step"])
def test_numbers_are_uniform(vary: str) -> None:
    count, cells = 20_000, 64
    parts = {"seed": np.full(count, 5), "position": np.full(count, 6), "step": np.full(count, 7)}
    parts[vary] = np.arange(count)
    seed = parts["seed"].astype(np.uint64)
    position, step = parts["position"].astype(np.int32), parts["step"].astype(np.int32)
    u = uniform(seed, position, step, Purpose.RESIDUAL)
    counts = np.bincount((u * cells).astype(int), minlength=cells)
    assert fits(counts, np.full(cells, 1 / cells))
    pairs = np.bincount((u[:-1:2] * 8).astype(int) * 8 + (u[1::2] * 8).astype(int), minlength=64)
    assert fits(pairs, np.full(64, 1 / 64))


def test_purposes_draw_independent_numbers() -> None:
    count = 20_000
    position, zero = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    seed = np.full(count, 9, np.uint64)
    cells = [
        (uniform(seed, position, zero, p) * 8).astype(int) for p in (Purpose.DRAFT, Purpose.ACCEPT)
    ]
    assert fits(np.bincount(cells[0] * 8 + cells[1], minlength=64), np.full(64, 1 / 64))


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows: list[Array] = [
        rng.integers(0, 2**63, size=9).astype(np.uint64),
        rng.integers(0, 1000, size=9).astype(np.int32),
        rng.integers(0, 1000, size=9).astype(np.int32),
    ]
    assert_rows_alone(lambda a, b, c: uniform(a, b, c, Purpose.RESIDUAL), rows, choice)


def test_arguments_are_left_alone() -> None:
    keys, counters = np.array([5], np.uint64), np.array([[1, 2, 3, 4]], np.uint32)
    philox(keys, counters)
    assert_same_bits(counters, np.array([[1, 2, 3, 4]], np.uint32))
    assert keys.tolist() == [5]
