from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.tiny import tensors
from ultraflash.graphs.ops.engram_ids import DEAD, EngramIds

MAP = tensors("engram_hash")["tiny.token_map"]


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_compressed_ids_and_dead_image_rows(rng: np.random.Generator, rows: int) -> None:
    ids = rng.integers(0, len(MAP), size=rows).astype(np.int32)
    is_image = rng.integers(0, 2, size=rows).astype(np.int32)
    y = EngramIds.reference(ids, is_image, MAP)
    assert y.dtype == np.int32
    assert y.tolist() == [
        DEAD if dead else int(MAP[i]) for i, dead in zip(ids, is_image, strict=True)
    ]


def test_no_token_is_dead_by_itself() -> None:
    """DEAD must not be a compressed id: those start at 0."""
    every = np.arange(len(MAP), dtype=np.int32)
    y = EngramIds.reference(every, np.zeros_like(every), MAP)
    assert DEAD < 0 <= y.min()
    assert_same_bits(y, MAP.astype(np.int32))


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    ids = rng.integers(0, len(MAP), size=9).astype(np.int32)
    image = (np.arange(9) % 3 == 0).astype(np.int32)
    assert_rows_alone(lambda a, b: EngramIds.reference(a, b, MAP), [ids, image], choice)


OP = EngramIds(io("i", 3), io("im", 3), weight("m", 512, dtype="i64"), scratch("y", 3, dtype="i32"))


def test_launch() -> None:
    assert_launch(OP, "engram_ids", ("i", "im", "m", "y"))


def test_cost_counts_only_the_entries_looked_up() -> None:
    assert_cost(OP, 3 * (4 + 4 + 8 + 4))
