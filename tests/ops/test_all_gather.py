"""all_gather: all ranks' columns."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_launch, scratch
from ultraflash.graphs.ops.all_gather import AllGather


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_gather_sets_columns_side_by_side(rng: np.random.Generator, world: int, rows: int) -> None:
    parts = [rng.normal(size=(rows, 7)).astype(np.float32) for _ in range(world)]
    y = AllGather.reference(parts)
    assert y.shape == (rows, 7 * world)
    for rank, part in enumerate(parts):
        assert_same_bits(y[:, 7 * rank : 7 * rank + 7], part)


@pytest.mark.parametrize("bits", [0x80000000, 0x7F800000, 0xFF800000, 1, 0x7FFFFFFF])
def test_every_value_arrives_bit_for_bit(bits: int) -> None:
    parts = [np.full((1, 2), value, np.uint32).view(np.float32) for value in (bits, 0)]
    assert AllGather.reference(parts).view(np.uint32).tolist() == [[bits, bits, 0, 0]]


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    parts = [rng.normal(size=(9, 64)).astype(np.float32) for _ in range(3)]
    assert_rows_alone(lambda *ranks: AllGather.reference(list(ranks)), parts, choice)


def test_it_is_collective() -> None:
    """The interpreter hands it all ranks' arrays."""
    assert AllGather.COLLECTIVE


GATHER = AllGather(scratch("x", 3, 64, dtype="f32"), scratch("y", 3, 256, dtype="f32"))


def test_launch() -> None:
    assert_launch(GATHER, "all_gather", ("x", "y"))
    assert GATHER.geometry().x == 1


def test_cost() -> None:
    """One rank's own memory; what crosses the link is not counted here."""
    assert GATHER.cost().nbytes == 3 * 64 * 4 * 5
