from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded
from helpers.formats import bf16_ulp
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.tiny import tensors
from helpers.values import ROWS, activations
from ultraflash.graphs.ops.hc_expand import HcExpand


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_against_float64(rng: np.random.Generator, rows: int, copies: int) -> None:
    out, x = activations(rng, rows, 96), activations(rng, rows, copies, 96)
    post = rng.random((rows, copies)).astype(np.float32)
    comb = rng.random((rows, copies, copies)).astype(np.float32)
    y = HcExpand.reference(out, x, post, comb)
    want, size = np.zeros(x.shape), np.zeros(x.shape)
    for j in range(copies):
        parts = [post[:, j, None].astype(np.float64) * out]
        parts += [comb[:, i, j, None].astype(np.float64) * x[:, i] for i in range(copies)]
        want[:, j], size[:, j] = sum(parts), sum(np.abs(p) for p in parts)
    # float32 products and sums of at most five terms.
    assert_rounded(y, want, "bf16", (copies + 1) * 2.0**-24 * size)


def test_the_sum_runs_over_the_first_index() -> None:
    """Copy 2 goes to copy 0 when comb[2][0] is the only entry; transposed it would come from 0."""
    x = np.zeros((1, 3, 32), np.float32)
    x[0, 2] = 5
    comb = np.zeros((1, 3, 3), np.float32)
    comb[0, 2, 0] = 1
    y = HcExpand.reference(np.zeros((1, 32), np.float32), x, np.zeros((1, 3), np.float32), comb)
    assert (y[0, 0] == 5).all()
    assert (y[0, 1:] == 0).all()


def test_against_the_authors() -> None:
    golden = tensors("sinkhorn")
    y = HcExpand.reference(*(golden[f"mix.{name}"] for name in ("y", "X", "post", "comb")))
    want = golden["mix.expand"]
    assert (np.abs(y - want) <= bf16_ulp(want)).all()  # the order of five fp32 additions is theirs


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [
        activations(rng, 9, 256), activations(rng, 9, 4, 256),
        rng.random((9, 4)).astype(np.float32), rng.random((9, 4, 4)).astype(np.float32),
    ]  # fmt: skip
    assert_rows_alone(HcExpand.reference, rows, choice)


OP = HcExpand(
    scratch("o", 3, 64),
    scratch("x", 3, 4, 64),
    scratch("p", 3, 4, dtype="f32"),
    scratch("c", 3, 4, 4, dtype="f32"),
    scratch("y", 3, 4, 64),
)


def test_launch() -> None:
    assert_launch(OP, "hc_expand", ("o", "x", "p", "c", "y"))


def test_cost() -> None:
    assert_cost(OP, 2 * 3 * (64 + 256 + 256) + 4 * 3 * (4 + 16))
