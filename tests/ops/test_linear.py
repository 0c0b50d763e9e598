"""Linear against correctly rounded sums: `math.fsum` of products that are exact in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import activations, dense_weight, fp4_weight, fp8_weight, through_q8
from ultraflash.graphs.ops.linear import Linear

SHAPES = [(1, 32, 1), (2, 64, 33), (5, 96, 40), (16, 256, 24), (3, 5120, 7)]  # rows, K, N


def exact(x: F32, w: F64, groups: int = 1) -> F64:
    """Sums rounded once to float64; 8 x 24 bit products are exact."""
    per_group, size = len(w) // groups, w.shape[1]
    y = np.empty((len(x), len(w)))
    for row in range(len(x)):
        for n in range(len(w)):
            part = x[row, n // per_group * size :][:size].astype(np.float64)
            y[row, n] = math.fsum(part * w[n])
    return y


def slack(x: F32, w: F64) -> F64:
    """Rounding of float64 sums: far below an ulp of the result, unless everything cancels."""
    error: F64 = x.shape[1] * 2.0**-53 * (np.abs(x.astype(np.float64)) @ np.abs(w).T)
    return error


@pytest.mark.parametrize("form", ["bf16", "f32"])
@pytest.mark.parametrize(("rows", "size", "out"), SHAPES)
def test_bf16_weights(rng: np.random.Generator, rows: int, size: int, out: int, form: str) -> None:
    x, w = activations(rng, rows, size), dense_weight(rng, out, size)
    y = Linear.reference(x, w, 1, form == "bf16")
    assert_rounded(y, exact(x, w), form, slack(x, w))


@pytest.mark.parametrize("form", ["bf16", "f32"])
@pytest.mark.parametrize(("rows", "size", "out"), SHAPES)
@pytest.mark.parametrize("make", [fp8_weight, fp4_weight], ids=["fp8", "fp4"])
def test_quantised_operands(
    rng: np.random.Generator, rows: int, size: int, out: int, form: str, make: object
) -> None:
    assert callable(make)
    x, w = through_q8(activations(rng, rows, size)), make(rng, out, size)
    y = Linear.reference(x, w, 1, form == "bf16")
    assert_rounded(y, exact(x, w), form, slack(x, w))


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_groups_see_their_own_part_of_the_input(
    rng: np.random.Generator, rows: int, groups: int
) -> None:
    x, w = activations(rng, rows, groups * 64), dense_weight(rng, groups * 5, 64)
    y = Linear.reference(x, w, groups, True)
    assert_rounded(y, exact(x, w, groups), "bf16", 2.0**-40)
    for group in range(groups):
        part = x[:, 64 * group : 64 * group + 64]
        alone = Linear.reference(part, w[5 * group : 5 * group + 5], 1, True)
        assert_same_bits(y[:, 5 * group : 5 * group + 5], alone)


def test_one_rounding_not_two() -> None:
    """1 + 2^-8 + 2^-30 is above the tie of bf16; a detour over float32 lands on it."""
    x = np.array([[1, 2.0**-8, 2.0**-30]], np.float32)
    y = Linear.reference(x, np.ones((1, 3)), 1, True)
    assert y[0, 0] == 1 + 2.0**-7


def test_ties_go_to_even() -> None:
    x = np.array([[1, 2.0**-8], [1 + 2.0**-7, 2.0**-8]], np.float32)
    y = Linear.reference(x, np.ones((1, 2)), 1, True)
    assert y[:, 0].tolist() == [1, 1 + 2.0**-6]


def test_cancellation_leaves_the_small_part() -> None:
    x = np.array([[2.0**20, 1, -(2.0**20)]], np.float32)
    assert Linear.reference(x, np.ones((1, 3)), 1, False)[0, 0] == 1


def test_shards_of_the_input_add_up(rng: np.random.Generator) -> None:
    """Ranks that split the input hold fp32 parts of the same sum."""
    x, w = activations(rng, 4, 256), dense_weight(rng, 24, 256)
    parts = [
        Linear.reference(x[:, a : a + 64], np.ascontiguousarray(w[:, a : a + 64]), 1, False)
        for a in range(0, 256, 64)
    ]
    total = np.sum([p.astype(np.float64) for p in parts], axis=0)
    assert np.abs(total - exact(x, w)).max() <= 4 * 2.0**-24 * max(np.abs(p).max() for p in parts)


@pytest.mark.parametrize("form", ["bf16", "f32"])
@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice, form: str) -> None:
    x, w = through_q8(activations(rng, 16, 1024)), fp8_weight(rng, 96, 1024)
    assert_rows_alone(lambda rows: Linear.reference(rows, w, 1, form == "bf16"), [x], choice)


@every_choice
def test_rows_stand_alone_in_groups(rng: np.random.Generator, choice: Choice) -> None:
    x, w = activations(rng, 16, 8 * 128), fp8_weight(rng, 8 * 32, 128)
    assert_rows_alone(lambda rows: Linear.reference(rows, w, 8, True), [x], choice)


def test_launch() -> None:
    op = Linear(scratch("x", 3, 128), weight("w", 64, 64), scratch("y", 3, 64), groups=2)
    assert_launch(op, "linear", ("x", "w", "y"), groups=2, rounded=True)


def test_cost_of_the_head() -> None:
    """1,323.8 MB of bf16 (model.md 9) dominate."""
    op = Linear(
        scratch("x", 1, 5120),
        weight("w", 129280, 5120),
        scratch("y", 1, 129280, dtype="f32"),
        rounded=False,
    )
    assert_cost(op, 1_323_827_200 + 2 * 5120 + 4 * 129280, 2 * 129280 * 5120)


def test_cost_of_an_fp8_matrix() -> None:
    """One scale byte for 32 x 32 weights: wq_b of the release is [32768, 1280] and [1024, 40]."""
    op = Linear(
        scratch("x", 6, 1280), weight("w", 32768, 1280, dtype="fp8"), scratch("y", 6, 32768)
    )
    assert_cost(op, 32768 * 1280 + 1024 * 40 + 6 * 2 * (1280 + 32768), 2 * 6 * 32768 * 1280)


def test_cost_of_the_grouped_matrix() -> None:
    """wo_a: every weight serves one group, so work is rows times weights."""
    op = Linear(
        scratch("x", 2, 32768),
        weight("w", 8192, 4096, dtype="fp8"),
        scratch("y", 2, 8192),
        groups=8,
    )
    assert_cost(op, 8192 * 4096 + 256 * 128 + 2 * 2 * (32768 + 8192), 2 * 2 * 8192 * 4096)


@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 128, 4096])
def test_every_shape_has_a_launch(rows: int, form: str) -> None:
    """Within a CTA's shared memory, with copies under way, and all outputs covered."""
    for size, columns in ((4, 5120), (64, 32), (512, 15360), (129280, 5120), (25600, 6144)):
        w = weight("w", size, columns, dtype=form)
        op = Linear(scratch("x", rows, columns), w, scratch("y", rows, size))
        spread, kernel = op.geometry(), op.variant()
        assert spread.shared <= 227 << 10
        assert kernel["DEPTH"] > 1
        high = 8 * kernel["N_TILES"] if kernel["FEW"] else 128
        assert spread.y == -(-rows // high)
        assert kernel["FEW"] or spread.x == -(-size // 128)


def test_what_tiles_cannot_hold() -> None:
    for size, columns, groups in ((64, 48, 1), (48, 64, 2)):
        w = weight("w", size, columns)
        op = Linear(scratch("x", 1, groups * columns), w, scratch("y", 1, size), groups)
        with pytest.raises(AssertionError, match="tiles"):
            op.geometry()
