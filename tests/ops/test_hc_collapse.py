from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded
from helpers.formats import bf16_ulp
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch
from helpers.tiny import tensors
from helpers.values import ROWS, activations
from ultraflash.graphs.ops.hc_collapse import HcCollapse


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_against_float64(rng: np.random.Generator, rows: int, copies: int) -> None:
    x, pre = activations(rng, rows, copies, 96), rng.random((rows, copies)).astype(np.float32)
    parts = x.astype(np.float64) * pre[:, :, None]
    # float32 products and sums of at most four copies.
    error = copies * 2.0**-24 * np.abs(parts).sum(axis=1)
    assert_rounded(HcCollapse.reference(x, pre), parts.sum(axis=1), "bf16", error)


def test_the_first_collapse_is_copy_0(rng: np.random.Generator) -> None:
    x = activations(rng, 5, 4, 64)
    pre = np.tile(np.array([1, 0, 0, 0], np.float32), (5, 1))
    assert np.array_equal(HcCollapse.reference(x, pre), x[:, 0])


def test_against_the_authors() -> None:
    golden = tensors("sinkhorn")
    y = HcCollapse.reference(golden["mix.X"], golden["mix.pre"])
    want = golden["mix.collapse"]
    assert (np.abs(y - want) <= bf16_ulp(want)).all()  # the order of four fp32 additions is theirs


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    x, pre = activations(rng, 9, 4, 256), rng.random((9, 4)).astype(np.float32)
    assert_rows_alone(HcCollapse.reference, [x, pre], choice)


OP = HcCollapse(scratch("x", 3, 4, 64), scratch("p", 3, 4, dtype="f32"), scratch("y", 3, 64))


def test_launch() -> None:
    assert_launch(OP, "hc_collapse", ("x", "p", "y"))


def test_cost() -> None:
    assert_cost(OP, 2 * 3 * 4 * 64 + 4 * 3 * 4 + 2 * 3 * 64)
