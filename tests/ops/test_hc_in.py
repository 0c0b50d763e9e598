from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import ROWS, activations
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.hc_in import HcIn
from ultraflash.graphs.ops.quant8 import Quant8
from ultraflash.graphs.ops.rms_norm import RmsNorm

EPS = 1e-20


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("copies", "dim"), [(4, 64), (2, 32), (4, 5120)])
def test_it_is_collapse_norm_and_q8(
    rng: np.random.Generator, rows: int, copies: int, dim: int
) -> None:
    """Each of them is compared with float64 and the model authors on its own."""
    x, pre = activations(rng, rows, copies, dim), rng.random((rows, copies)).astype(np.float32)
    norm = activations(rng, dim)
    y, y_q8 = HcIn.reference(x, pre, norm, EPS)
    want = RmsNorm.reference(HcCollapse.reference(x, pre), norm, EPS)
    assert_same_bits(y, want)
    assert_same_bits(y_q8, Quant8.reference(want))


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    rows = [activations(rng, 9, 4, 256), rng.random((9, 4)).astype(np.float32)]
    norm = activations(rng, 256)
    assert_rows_alone(lambda x, pre: HcIn.reference(x, pre, norm, EPS), rows, choice)


OP = HcIn(
    scratch("x", 6, 4, 5120),
    scratch("pre", 6, 4, dtype="f32"),
    weight("w", 5120),
    scratch("y", 6, 5120),
    scratch("q", 6, 5120),
    EPS,
)


def test_launch() -> None:
    assert_launch(OP, "hc_in", ("x", "pre", "w", "y", "q"), eps=EPS)


def test_cost() -> None:
    assert_cost(OP, 6 * 4 * (2 * 5120 + 4) + 2 * 5120 + 2 * 2 * 6 * 5120)
