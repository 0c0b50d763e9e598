"""Routed experts: a row's bits do not depend on how many rows there are, on who else chose its
experts, or on which of the kernels' two ways was taken; sums of many rows against their reference.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from helpers.device import REHEARSAL, report, sized
from helpers.device_cases import Case
from helpers.device_inputs import Inputs, chosen_experts, make_inputs, sorted_rows
from helpers.device_ops import Ops, run_case
from helpers.device_weights import Shelf
from helpers.ops import scratch, weight
from ultraflash.graphs.ops.expert_rows import ExpertRows, num_chunks
from ultraflash.graphs.ops.experts_down import ExpertsDown
from ultraflash.graphs.ops.experts_up import ExpertsUp, wide_rows
from ultraflash.graphs.plan import Op

pytestmark = pytest.mark.gpu

EXPERTS, K = 40, 6
# hidden, width: the released model on one of 4, 8 and 1 ranks, the tiny one on 1 and 2, odd sizes.
SMALL = [(256, 64), (256, 32)]
SIZES = sized([(5120, 576), (5120, 288), (5120, 2304), (2080, 160), *SMALL], SMALL)
MANY = sized(4096, 40)
REPEATS = sized(300, 20)


def up(rows: int, hidden: int, width: int, experts: int = EXPERTS) -> Op:
    names = ("w1", "w3")
    w1, w3 = (weight(n, experts, width, hidden, dtype="fp4") for n in names)
    ids, routing = scratch("i", rows, K, dtype="i32"), scratch("r", rows, K, dtype="f32")
    x, z = scratch("x", rows, hidden), scratch("z", rows, K, width)
    return sorted_if_many(ExpertsUp(x, ids, routing, w1, w3, z, 10.0), experts)


def down(rows: int, hidden: int, width: int, experts: int = EXPERTS, to: str = "f32") -> Op:
    w2 = weight("w2", experts, hidden, width, dtype="fp4")
    ids = scratch("i", rows, K, dtype="i32")
    z, y = scratch("z", rows, K, width), scratch("y", rows, K, hidden, dtype=to)
    return sorted_if_many(ExpertsDown(z, ids, w2, y, to == "bf16"), experts)


def sorted_if_many(op: Any, experts: int) -> Op:
    pairs = prod(op.ids.shape)
    rows = wide_rows(pairs, experts)
    if rows is None:
        return op
    shape = (num_chunks(pairs, experts, rows), 3)
    order, chunks = scratch("o", pairs, dtype="i32"), scratch("c", *shape, dtype="i32")
    return replace(op, order=order, chunks=chunks)


def some_of(whole: Inputs, rows: Any, op: Any) -> Inputs:
    """The inputs of some rows, in their order."""
    made = {
        name: value[rows] if name in ("x", "z", "ids", "weight") else value
        for name, value in whole.items()
    }
    made.pop("order", None), made.pop("chunks", None)
    if op.chunks is not None:
        made["order"], made["chunks"] = sorted_rows(made["ids"], EXPERTS, op.chunks)
    return made


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("build", [up, down])
def test_any_number_of_rows(
    ops: Ops, shelf: Shelf, build: Any, hidden: int, width: int, seed: int
) -> None:
    """All at once, then few of them, alone and with any others."""
    rng = np.random.default_rng(seed)
    op = build(MANY, hidden, width)
    whole = make_inputs(op, rng, shelf)
    whole["ids"][:24] = whole["ids"][0]  # more than a kernel takes at once have the same experts
    whole = some_of(whole, slice(None), op)
    want = ops.run(op, whole)["y"]
    for count in (1, 2, 7, 8, 16, 24, 33, 100, 1024):
        few = build(count, hidden, width)
        held = None
        for trial in range(sized(4, 1)):
            front = trial == 0 and count <= 24
            rows = np.arange(count) if front else rng.permutation(MANY)[: min(count, MANY)]
            if len(rows) < count:
                continue
            made = some_of(whole, rows, few)
            held = held or ops.hold(few, made)
            got = held.run(made)["y"]
            assert got.tobytes() == want[rows].tobytes(), f"{count} rows, trial {trial}"


@pytest.mark.skipif(REHEARSAL, reason="the interpreter has no races")
@pytest.mark.parametrize("rows", [7, 24, 600])
@pytest.mark.parametrize("build", [up, down])
def test_hundreds_of_times(ops: Ops, shelf: Shelf, build: Any, rows: int, seed: int) -> None:
    """Races show as a difference now and then."""
    op = build(rows, 5120, 576)
    made = make_inputs(op, np.random.default_rng(seed), shelf)
    held = ops.hold(op, made)
    want = held.run(made)["y"]
    for repeat in range(REPEATS):
        assert held.run(made)["y"].tobytes() == want.tobytes(), f"repeat {repeat}"


@pytest.mark.parametrize(("hidden", "width"), SIZES)
@pytest.mark.parametrize("build", [up, down])
@pytest.mark.parametrize("rows", [16, sized(700, 40)])
def test_many_rows(ops: Ops, shelf: Shelf, build: Any, rows: int, hidden: int, width: int) -> None:
    op = build(rows, hidden, width, 8, *(("bf16",) if build is down else ()))
    case = Case(f"{build.__name__}-{rows}x{hidden}x{width}", op)
    if found := run_case(ops, case, shelf):
        report(f"{case.name}: error over sum|xw| at most {found.largest:.2e}, rms {found.rms:.2e}")


@pytest.mark.parametrize(
    ("rows", "k", "experts"), [(1, 6, 384), (16, 3, 8), (300, 6, 384), (4096, 6, 384), (1000, 1, 3)]
)
def test_rows_of_experts(
    ops: Ops, shelf: Shelf, rows: int, k: int, experts: int, seed: int
) -> None:
    ids = scratch("i", rows, k, dtype="i32")
    order = scratch("o", rows * k, dtype="i32")
    chunks = scratch("c", num_chunks(rows * k, experts, 64), 3, dtype="i32")
    op = ExpertRows(ids, order, chunks, experts, 64)
    rng = np.random.default_rng(seed)
    for equal in (False, True):
        chosen = chosen_experts(rng, (rows, k), experts)
        if equal:
            chosen[:] = chosen[0]
        got = ops.run(op, {"ids": chosen})
        want = ExpertRows.reference(chosen, experts, 64)
        assert np.array_equal(got["order"], want[0])
        assert np.array_equal(got["chunks"], want[1])
