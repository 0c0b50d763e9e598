from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.formats import bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, weight
from helpers.values import activations
from ultraflash.graphs.ops.markov_embed import MarkovEmbed

NOT_DRAWN = 2**31 - 1  # whatever stands in columns that no draft filled yet


@pytest.mark.parametrize("sequences", [1, 2, 3, 16])
@pytest.mark.parametrize("block", [1, 5, 7])
def test_the_token_before_the_draft(rng: np.random.Generator, sequences: int, block: int) -> None:
    """y_0 is the anchor, y_i draft i - 1 (model.md 6.2); later drafts do not exist yet."""
    table = activations(rng, 50, 32)
    anchor = rng.integers(0, 50, sequences).astype(np.int32)
    drafts = rng.integers(0, 50, (sequences, block)).astype(np.int32)
    for index in range(block):
        known = drafts.copy()
        known[:, index:] = NOT_DRAWN
        before = anchor if index == 0 else drafts[:, index - 1]
        y = MarkovEmbed.reference(anchor, known, table, index)
        assert y.shape == (sequences, 32)
        for s in range(sequences):
            assert_same_bits(y[s], table[before[s]])


def test_the_rows_are_not_the_table() -> None:
    """What follows must not write into a weight."""
    table = bf16(np.ones((3, 8)))
    anchor, drafts = np.array([1], np.int32), np.array([[2]], np.int32)
    assert not np.shares_memory(MarkovEmbed.reference(anchor, drafts, table, 0), table)


@every_choice
def test_sequences_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    table = activations(rng, 50, 32)
    rows = [rng.integers(0, 50, 9).astype(np.int32), rng.integers(0, 50, (9, 5)).astype(np.int32)]
    for index in (0, 3):
        assert_rows_alone(lambda a, d, i=index: MarkovEmbed.reference(a, d, table, i), rows, choice)


OP = MarkovEmbed(io("a", 2), io("d", 2, 5), weight("t", 129280, 256), scratch("y", 2, 256), 4)


def test_launch() -> None:
    assert_launch(OP, "markov_embed", ("a", "d", "t", "y"), index=4)


def test_cost_counts_only_the_gathered_rows() -> None:
    assert_cost(OP, 2 * (2 * 2 * 256))
