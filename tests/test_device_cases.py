"""The device tests' inputs and comparisons, tried where there is no device.

The interpreter runs every case in the kernels' place; then one wrong element must be noticed.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from helpers.device_cases import Case, release_cases, tiny_cases
from helpers.device_inputs import make_inputs
from helpers.device_ops import NumpyOps, Sample, in_f32, run_case, written
from helpers.device_weights import Shelf, shrunk
from ultraflash.graphs.plan import Life, Op
from ultraflash.runtime.gpu import args

SHELF = Shelf()
KINDS = sorted({type(case.op).__name__ for case in tiny_cases()})


def of_kind(kind: str) -> list[Case]:
    return [case for case in tiny_cases() if type(case.op).__name__ == kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_passes(kind: str) -> None:
    for case in of_kind(kind):
        for trial in range(2):
            run_case(NumpyOps(), case, SHELF, trial)


class OneWrong(NumpyOps):
    """One element of what an operation writes is off by as little as must be noticed."""

    def __init__(self, field: str, rng: np.random.Generator) -> None:
        self.field, self.rng = field, rng

    def run(self, op: Op, made: dict[str, Any]) -> dict[str, Any]:
        out = super().run(op, made)
        array = out[self.field]
        at = tuple(int(self.rng.integers(n)) for n in array.shape)
        if array.dtype.kind == "f":
            array[at] = 2 * array[at] + 1 if np.isfinite(array[at]) else 0
        else:
            array[at] += 1
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_element_is_noticed(kind: str, rng: np.random.Generator) -> None:
    case = max(of_kind(kind), key=lambda c: sum(prod(ref.shape) for _, ref in written(c.op)))
    assert case.op.stem()
    for field, _ in written(case.op):
        # The large case without idle rows, and gates whose choice is clear.
        noticed = 0
        for _ in range(4):
            try:
                run_case(OneWrong(field, rng), case, SHELF, trial=0)
            except AssertionError:
                noticed += 1
        assert noticed >= 3, f"{field} of {case.name}"


@pytest.mark.parametrize("world", [1, 4, 8])
def test_release_shapes_can_be_launched(world: int) -> None:
    for case in release_cases(world):
        for op in (case.op, in_f32(case.op)):
            if op is None:
                continue
            launch = op.launch("sm_90a")
            assert launch.block[0] <= 1024, case.name
            assert launch.grid[1] <= 65535, case.name
            assert launch.shared <= 227 << 10, case.name
            packed = args.pack(op, lambda ref: (1, 2))
            assert len(packed) % 8 == 0
            assert args.struct_text(op).count("struct Args") == 1


@pytest.mark.parametrize("world", [1, 4, 8])
def test_release_inputs(world: int) -> None:
    """Plausible and of the right types (`make_inputs` looks); large weights are left out."""
    for case in release_cases(world):
        sizes = [prod(ref.shape) for _, ref in case.op.refs]
        if max(sizes) < 1 << 20:
            run_case(NumpyOps(), case, SHELF)


def test_a_sample_takes_as_many_columns_of_each_group() -> None:
    columns = np.array([1, 5, 8])
    assert Sample(columns).of(None, {"y": np.arange(10)[None]})["y"].tolist() == [[1, 5, 8]]  # type: ignore[arg-type]


def test_huge_weights_are_shrunk_and_nothing_else() -> None:
    for case in release_cases(1):
        for _, ref in shrunk(case.op).refs:
            assert ref.life is not Life.WEIGHT or ref.nbytes < 3 << 30
        assert shrunk(case.op) == case.op


def test_inputs_are_the_same_every_time() -> None:
    case = tiny_cases()[7]
    one, two = (make_inputs(case.op, case.rng(0), Shelf()) for _ in range(2))
    for name, value in one.items():
        other = two[name]
        for a, b in zip(arrays(value), arrays(other), strict=True):
            assert (a == b).all(), name


def arrays(value: Any) -> tuple[Any, ...]:
    return value.arrays if hasattr(value, "arrays") else (value,)
