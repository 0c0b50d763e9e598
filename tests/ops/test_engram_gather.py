from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_is_bf16, assert_same_bits
from helpers.formats import U8, dequantise
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import codes_without_nan
from ultraflash.graphs.ops.engram_gather import EngramGather

TABLE, DIM = 50, 64


class Table:
    """FP8 rows in memory."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.codes: U8 = codes_without_nan(rng, TABLE, DIM)
        self.scales: U8 = rng.integers(100, 140, size=(TABLE, DIM // 32)).astype(np.uint8)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("columns", [1, 6, 24])
def test_against_the_definition(rng: np.random.Generator, rows: int, columns: int) -> None:
    table = Table(rng)
    named = rng.integers(0, TABLE, size=(rows, columns))
    y = EngramGather.reference(named, table)
    assert_is_bf16(y)
    whole = dequantise("q8", table.codes, table.scales).astype(np.float32)
    for row in range(rows):
        assert_same_bits(y[row], np.concatenate([whole[i] for i in named[row]]))


@pytest.mark.parametrize("byte", [0, 1, 127, 240])
def test_extreme_scales(rng: np.random.Generator, byte: int) -> None:
    """Byte 0 is 2^-127, a float32 subnormal, not zero."""
    table = Table(rng)
    table.codes[:], table.scales[:] = 0x38, byte  # code of 1.0
    y = EngramGather.reference(np.zeros((1, 1), np.int64), table)
    assert (y == np.float32(2.0 ** (byte - 127))).all()
    assert (y > 0).all()


class Disk:
    """An array that can be indexed but not read as a whole."""

    def __init__(self, array: U8) -> None:
        self._array = array

    def __getitem__(self, at: object) -> U8:
        assert isinstance(at, np.ndarray), "only named rows are read"
        return self._array[at]


class Mapped:
    """A table of 203 GB in spirit."""

    def __init__(self, table: Table) -> None:
        self.codes, self.scales = Disk(table.codes), Disk(table.scales)


def test_only_the_named_rows_are_read(rng: np.random.Generator) -> None:
    table = Table(rng)
    named = np.array([[3, 49], [0, 3]])
    mapped = EngramGather.reference(named, Mapped(table))  # type: ignore[arg-type]
    assert_same_bits(mapped, EngramGather.reference(named, table))


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    table, named = Table(rng), rng.integers(0, TABLE, size=(9, 6))
    assert_rows_alone(lambda rows: EngramGather.reference(rows, table), [named], choice)


OP = EngramGather(
    scratch("r", 1, 24, dtype="i64"),
    weight("t", 384006168, 256, dtype="rows8"),
    scratch("y", 1, 24 * 256),
)


def test_launch() -> None:
    assert_launch(OP, "engram_gather", ("r", "t", "y"))


def test_cost_of_one_token() -> None:
    """24 rows of 264 bytes (model.md 4.3) and the result."""
    assert_cost(OP, 24 * 264 + 24 * 256 * 2)
