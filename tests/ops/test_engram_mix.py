from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64, bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.values import activations
from ultraflash.graphs.ops.engram_mix import EngramMix

EPS = 1e-20


def gates(x: F32, kv: F32, q_weight: F32, k_weight: F32) -> F64:
    """g_c of model.md 4.3 (module) in float64, copy by copy."""
    copies, hidden = q_weight.shape
    g = np.empty((len(x), copies))
    for row in range(len(x)):
        for c in range(copies):
            key = kv[row, hidden * c : hidden * (c + 1)].astype(np.float64)
            stream = x[row, c].astype(np.float64)
            dot = sum(stream * (q_weight[c].astype(np.float64) * k_weight[c]) * key)
            dot /= np.sqrt((stream**2).mean() + EPS) * np.sqrt((key**2).mean() + EPS)
            dot *= hidden**-0.5
            root = np.sqrt(max(abs(dot), 1e-6))
            g[row, c] = 1 / (1 + np.exp(-np.copysign(root, dot)))
    return g


def inputs(
    rng: np.random.Generator, rows: int, copies: int, hidden: int
) -> tuple[F32, F32, F32, F32]:
    return (
        activations(rng, rows, copies, hidden),
        activations(rng, rows, (copies + 1) * hidden, spread=0.5),
        activations(rng, copies, hidden, spread=0.2),
        activations(rng, copies, hidden, spread=0.2),
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("copies", "hidden"), [(4, 64), (4, 256), (1, 32), (2, 96)])
def test_against_float64(rng: np.random.Generator, rows: int, copies: int, hidden: int) -> None:
    x, kv, q_weight, k_weight = inputs(rng, rows, copies, hidden)
    is_image = np.zeros(rows, np.int32)
    y = EngramMix.reference(x, kv, q_weight, k_weight, is_image, EPS)
    added = gates(x, kv, q_weight, k_weight)[:, :, None] * kv[:, None, copies * hidden :]
    # float32 from the similarity on: about ten roundings on the gate, one on the sum.
    error = 2.0**-20 * np.abs(added) + 2.0**-24 * np.abs(x)
    assert_rounded(y, x + added, "bf16", error)


def test_image_rows_pass_unchanged(rng: np.random.Generator) -> None:
    x, kv, q_weight, k_weight = inputs(rng, 4, 4, 32)
    is_image = np.array([1, 0, 1, 0], np.int32)
    y = EngramMix.reference(x, kv, q_weight, k_weight, is_image, EPS)
    assert np.array_equal(y[::2], x[::2])
    text = EngramMix.reference(x, kv, q_weight, k_weight, np.zeros(4, np.int32), EPS)
    assert_same_bits(y[1::2], text[1::2])
    assert not np.array_equal(text[::2], x[::2])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_key_that_hardly_meets_its_stream_still_counts(sign: float) -> None:
    """Similarities below 1e-6 count as 1e-6, with their sign: sigmoid(+-1e-3) = 0.5 +- 0.00025."""
    hidden = 32
    x, kv = np.full((1, 1, hidden), -64, np.float32), np.zeros((1, 2 * hidden), np.float32)
    x[0, 0, 0], kv[0, 0], kv[0, hidden:] = sign * 2.0**-20, 1, 128
    ones = np.ones((1, hidden), np.float32)
    y = EngramMix.reference(x, kv, ones, ones, np.zeros(1, np.int32), EPS)
    # -64 + 128 * gate: the halves cancel, so that bf16 shows the rest.
    assert y[0, 0, -1] == pytest.approx(sign * 128 * 0.00025, rel=2.0**-8)


def test_extreme_similarity_overflows_nothing() -> None:
    """Aligned and opposed streams of any size close or open the gate."""
    hidden = 64
    x = bf16(np.ones((2, 1, hidden)) * 1e4)
    kv = bf16(np.concatenate([[[1e4] * hidden, [-1e4] * hidden], np.ones((2, hidden))], axis=1))
    big = bf16(np.full((1, hidden), 100.0))
    y = EngramMix.reference(x, kv, big, big, np.zeros(2, np.int32), EPS)
    assert np.isfinite(y).all()


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    x, kv, q_weight, k_weight = inputs(rng, 9, 4, 256)
    image = (np.arange(9) % 4 == 1).astype(np.int32)
    assert_rows_alone(
        lambda a, b, c: EngramMix.reference(a, b, q_weight, k_weight, c, EPS),
        [x, kv, image],
        choice,
    )


OP = EngramMix(
    scratch("x", 3, 4, 64),
    scratch("kv", 3, 320),
    weight("q", 4, 64),
    weight("k", 4, 64),
    io("i", 3),
    scratch("y", 3, 4, 64),
    EPS,
)


def test_launch() -> None:
    assert_launch(OP, "engram_mix", ("x", "kv", "q", "k", "i", "y"), eps=EPS)


def test_cost() -> None:
    assert_cost(OP, 2 * (3 * 256 + 3 * 320 + 2 * 256 + 3 * 256) + 4 * 3)
