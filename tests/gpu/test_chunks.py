"""Kernels with a way of their own for a prompt's many rows give a row the bits of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.device import sized
from helpers.device_inputs import make_inputs
from helpers.device_ops import Ops
from helpers.device_weights import Shelf
from helpers.ops import scratch, weight
from ultraflash.graphs.ops.hc_mix import HcMix
from ultraflash.graphs.ops.moe_sum import MoeSum

pytestmark = pytest.mark.gpu

COPIES = 4
MOST = sized(1024, 40)
COUNTS = sized((1, 7, 16, 17, 100, 128), (1, 16, 17))


def mix(rows: int, hidden: int) -> HcMix:
    outputs = 2 * COPIES + COPIES**2
    fn = weight("fn", outputs, COPIES * hidden, dtype="f32")
    scale, base = weight("scale", 3, dtype="f32"), weight("base", outputs, dtype="f32")
    pre, post = (scratch(n, rows, COPIES, dtype="f32") for n in ("p", "q"))
    comb = scratch("c", rows, COPIES, COPIES, dtype="f32")
    return HcMix(
        scratch("x", rows, COPIES, hidden), fn, scale, base, pre, post, comb, 20, 1e-6, 1e-20
    )


def total(rows: int, hidden: int) -> MoeSum:
    routed = scratch("r", rows, 6, hidden, dtype="f32")
    shared, y = (scratch(n, rows, hidden, dtype="f32") for n in ("s", "y"))
    return MoeSum(routed, shared, y, rounded=False)


@pytest.mark.parametrize("hidden", [5120, 64])
@pytest.mark.parametrize("build", [mix, total])
def test_rows_do_not_know_each_other(
    ops: Ops, shelf: Shelf, build: Any, hidden: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    op = build(MOST, hidden)
    made = make_inputs(op, rng, shelf)
    want = ops.run(op, made)
    by_row = [name for name in ("x", "routed", "shared") if name in made]
    for count in COUNTS:
        first = int(rng.integers(0, MOST - count + 1))
        some = slice(first, first + count)
        got = ops.run(build(count, hidden), made | {name: made[name][some] for name in by_row})
        for name, value in got.items():
            assert np.isfinite(value).all()
            assert value.tobytes() == want[name][some].tobytes(), f"{name} of {count} rows"
