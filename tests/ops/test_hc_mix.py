from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_within
from helpers.formats import F32, F64
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.tiny import tensors
from helpers.values import activations
from ultraflash.graphs.ops.hc_mix import HcMix, split_mixes

ITERATIONS, EPS, NORM_EPS = 20, 1e-6, 1e-20


def by_definition(
    m: F64, scale: F32, base: F32, copies: int, iterations: int
) -> tuple[F64, F64, F64]:
    """Coefficients of one row's projections (model.md 4.2), in float64 and one by one."""

    def sigmoid(value: float) -> float:
        return float(1 / (1 + np.exp(-value)))

    wide, shift = scale.astype(np.float64), base.astype(np.float64)
    pre = np.array([sigmoid(m[i] * wide[0] + shift[i]) + EPS for i in range(copies)])
    post = np.array(
        [2 * sigmoid(m[copies + i] * wide[1] + shift[copies + i]) for i in range(copies)]
    )
    c = np.empty((copies, copies))
    for i in range(copies):
        for j in range(copies):
            at = 2 * copies + copies * i + j
            c[i, j] = m[at] * wide[2] + shift[at]
    for i in range(copies):
        e = np.exp(c[i] - c[i].max())
        c[i] = e / e.sum() + EPS
    c = c / (c.sum(axis=0, keepdims=True) + EPS)
    for _ in range(iterations - 1):
        c = c / (c.sum(axis=1, keepdims=True) + EPS)
        c = c / (c.sum(axis=0, keepdims=True) + EPS)
    return pre, post, c


def weights(rng: np.random.Generator, copies: int, hidden: int) -> tuple[F64, F32, F32]:
    count = 2 * copies + copies**2
    fn = rng.normal(size=(count, copies * hidden)).astype(np.float32).astype(np.float64)
    fn = (fn * (copies * hidden) ** -0.5).astype(np.float32).astype(np.float64)
    return fn, rng.random(3).astype(np.float32), rng.normal(size=count).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("copies", "hidden"), [(4, 64), (2, 32), (4, 5120)])
def test_against_float64(rng: np.random.Generator, rows: int, copies: int, hidden: int) -> None:
    x, (fn, scale, base) = activations(rng, rows, copies, hidden), weights(rng, copies, hidden)
    pre, post, comb = HcMix.reference(x, fn, scale, base, ITERATIONS, EPS, NORM_EPS)
    assert pre.shape == post.shape == (rows, copies)
    assert comb.shape == (rows, copies, copies)
    assert pre.dtype == post.dtype == comb.dtype == np.float32
    for row in range(rows):
        f = x[row].reshape(-1).astype(np.float64)
        m = (fn @ f) / np.sqrt((f**2).mean() + NORM_EPS)
        want = by_definition(m, scale, base, copies, ITERATIONS)
        # float32 from the projection on; 39 normalisations of values below 1 keep 1e-6.
        for got, exact in zip((pre, post, comb), want, strict=True):
            assert_within(got[row], exact, 2e-6)


@pytest.mark.parametrize("iterations", [1, 20])
def test_against_the_authors(iterations: int) -> None:
    golden = tensors("sinkhorn")
    got = split_mixes(golden["mixes"], golden["scale"], golden["base"], 4, iterations, EPS)
    for name, array in zip(("pre", "post", "comb"), got, strict=True):
        assert_within(array, golden[f"iters{iterations}.{name}"], 1e-6)


def test_check_vector() -> None:
    """Model.md 4.2."""
    i = np.arange(24)
    m, base = ((7 * i % 11) - 5) / 4, ((3 * i % 5) - 2) / 8
    pre, post, comb = split_mixes(
        m[None].astype(np.float32),
        np.array([0.5, 1, 2], np.float32),
        base.astype(np.float32),
        4,
        20,
        EPS,
    )
    assert_within(pre, [[0.29421598, 0.59266764, 0.40733442, 0.70578605]], 1e-7)
    assert_within(post, [[1.124353, 0.5378828, 1.50983, 0.93758124]], 1e-6)
    assert_within(comb[0, 0], [0.16940556, 0.52730566, 0.17882368, 0.12446407], 1e-6)
    assert_within(comb[0, 3], [0.41590184, 0.00988454, 0.0033524, 0.5708603], 1e-6)


def test_columns_end_normalised(rng: np.random.Generator) -> None:
    """The last step divides by column sums; after twenty rounds the rows are nearly as good."""
    mixes = (rng.normal(size=(50, 24)) * 3).astype(np.float32)
    *_, comb = split_mixes(mixes, np.ones(3, np.float32), np.zeros(24, np.float32), 4, 20, EPS)
    assert_within(comb.sum(axis=1), np.ones((50, 4)), 3e-6)
    assert np.abs(comb.sum(axis=2) - 1).max() < 0.05


def test_extreme_projections_overflow_nothing() -> None:
    mixes = np.full((2, 24), 1e4, np.float32)
    mixes[1, ::2] = -1e4
    pre, post, comb = split_mixes(
        mixes, np.ones(3, np.float32), np.zeros(24, np.float32), 4, 20, EPS
    )
    for array in (pre, post, comb):
        assert np.isfinite(array).all()
    assert pre.min() >= np.float32(EPS)  # pre has a floor, post has none
    assert post.min() < 1e-30


def test_a_zero_stream_gives_the_base(rng: np.random.Generator) -> None:
    fn, scale, base = weights(rng, 4, 32)
    x = np.zeros((1, 4, 32), np.float32)
    pre, _, _ = HcMix.reference(x, fn, scale, base, ITERATIONS, EPS, NORM_EPS)
    assert_within(pre[0], 1 / (1 + np.exp(-base[:4].astype(np.float64))) + EPS, 2e-7)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    x, fixed = activations(rng, 9, 4, 256), weights(rng, 4, 256)
    assert_rows_alone(
        lambda rows: HcMix.reference(rows, *fixed, ITERATIONS, EPS, NORM_EPS), [x], choice
    )


OP = HcMix(
    scratch("x", 6, 4, 5120),
    weight("f", 24, 20480, dtype="f32"),
    weight("s", 3, dtype="f32"),
    weight("b", 24, dtype="f32"),
    scratch("pre", 6, 4, dtype="f32"),
    scratch("post", 6, 4, dtype="f32"),
    scratch("c", 6, 4, 4, dtype="f32"),
    ITERATIONS,
    EPS,
    NORM_EPS,
)


def test_launch() -> None:
    names = ("x", "f", "s", "b", "pre", "post", "c")
    assert_launch(OP, "hc_mix", names, iterations=20, eps=EPS, norm_eps=NORM_EPS)


def test_cost_of_the_release() -> None:
    """The projection matrix is nearly all of it: 24 * 20480 * 4 bytes."""
    small = 2 * 6 * 20480 + 4 * (3 + 24) + 4 * 6 * (4 + 4 + 16)
    assert_cost(OP, 24 * 20480 * 4 + small, 2 * 6 * 24 * 20480)
