"""Products whose rows do not know how many they are: each alone and in every chunk, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.device import sized
from helpers.device_ops import Ops
from helpers.device_weights import Shelf
from helpers.values import activations
from ultraflash.graphs.numerics import fake_q8
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.plan import Life, Ref

pytestmark = pytest.mark.gpu

MOST = sized(4096, 48)
COUNTS = sized((2, 7, 8, 9, 16, 17, 33, 128, 1000, 1024), (2, 9, 16, 33))
ALONE = sized(24, 3)
REPEATS = sized(200, 1)
FP8, BF16 = "layers.0.attn.wq_a", "head"
# name, columns, size, groups, output: parts of one tile and of many, cut rows of tiles, all kinds
SHAPES = [
    (FP8, 64, 256, 1, "bf16"), (FP8, 128, 256, 2, "bf16"), (FP8, 256, 32, 1, "f32"),
    (FP8, 1280, 192, 1, "bf16"), (FP8, 1280, 5120, 1, "bf16"), (FP8, 5120, 288, 1, "f32"),
    (FP8, 2048, 4096, 2, "bf16"), (FP8, 8192, 1280, 1, "bf16"), (FP8, 512, 15360, 1, "f32"),
    (BF16, 8, 256, 1, "bf16"), (BF16, 4, 5120, 1, "bf16"), (BF16, 512, 5120, 1, "f32"),
    (BF16, 1010, 256, 1, "f32"),
]  # fmt: skip


def product(rows: int, shape: tuple[str, int, int, int, str]) -> Linear:
    name, columns, size, groups, out = shape
    x = Ref("x", (rows, groups * size), "bf16", Life.SCRATCH)
    w = Ref(name, (columns, size), "fp8" if name == FP8 else "bf16", Life.WEIGHT)
    return Linear(x, w, Ref("y", (rows, columns), out, Life.SCRATCH), groups, out == "bf16")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_know_each_other(
    ops: Ops, shelf: Shelf, shape: tuple[str, int, int, int, str]
) -> None:
    rng = np.random.default_rng(shape[1] + shape[2])
    whole = product(MOST, shape)
    weight = shelf.weight(whole, "w", whole.w)
    x = activations(rng, *whole.x.shape, spread=1.0)
    x = fake_q8(x) if whole.w.dtype == "fp8" else x
    want = ops.run(whole, {"x": x, "w": weight})["y"]
    assert np.isfinite(want).all()
    for count in COUNTS:
        first = int(rng.integers(0, MOST - count + 1))
        got = ops.run(product(count, shape), {"x": x[first : first + count], "w": weight})["y"]
        assert_same_bits(got, want[first : first + count])
    alone = ops.hold(product(1, shape), {"x": x[:1], "w": weight})
    for row in rng.integers(0, MOST, ALONE).tolist():
        assert_same_bits(alone.run({"x": x[row : row + 1]})["y"], want[row : row + 1])


@pytest.mark.parametrize("rows", [7, 16, sized(300, 20)])
def test_repeats_are_equal(ops: Ops, shelf: Shelf, rows: int) -> None:
    """Operands are read while others arrive: a slip would show now and then."""
    op = product(rows, (FP8, 1792, 5120, 1, "f32"))
    made = {
        "x": fake_q8(activations(np.random.default_rng(rows), rows, 5120, spread=1.0)),
        "w": shelf.weight(op, "w", op.w),
    }
    held = ops.hold(op, made)
    want = held.run(made)["y"]
    for _ in range(REPEATS):
        assert_same_bits(held.run(made)["y"], want)
