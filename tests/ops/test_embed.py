from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.formats import bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.values import activations
from ultraflash.graphs.ops.embed import Embed


@pytest.mark.parametrize("ids", [[0], [6, 6, 6], [3, 0, 6, 1, 3]])
@pytest.mark.parametrize("copies", [1, 4])
def test_every_copy_is_the_token_and_the_first_collapse_takes_copy_0(
    rng: np.random.Generator, ids: list[int], copies: int
) -> None:
    table = activations(rng, 7, 32)
    x, pre = Embed.reference(np.array(ids, np.int32), table, copies)
    assert x.shape == (len(ids), copies, 32)
    for row, token in enumerate(ids):
        for copy in range(copies):
            assert_same_bits(x[row, copy], table[token])
    assert pre.dtype == np.float32
    assert pre.tolist() == [[1.0] + [0.0] * (copies - 1)] * len(ids)


def test_the_streams_are_not_the_table() -> None:
    """What follows must not write into a weight."""
    table = bf16(np.ones((3, 32)))
    x, _ = Embed.reference(np.array([1], np.int32), table, 4)
    assert not np.shares_memory(x, table)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    table, ids = activations(rng, 50, 64), rng.integers(0, 50, size=9).astype(np.int32)
    assert_rows_alone(lambda rows: Embed.reference(rows, table, 4), [ids], choice)


OP = Embed(
    io("i", 3), weight("t", 129280, 64), scratch("x", 3, 4, 64), scratch("p", 3, 4, dtype="f32"), 4
)


def test_launch() -> None:
    assert_launch(OP, "embed", ("i", "t", "x", "p"), copies=4)


def test_cost_counts_only_the_gathered_rows() -> None:
    assert_cost(OP, 3 * 64 * 2 + 3 * 4 * 64 * 2 + 3 * 4 * 4)
