from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.layouts import Layout, every_layout
from helpers.ops import assert_launch, io, scratch
from ultraflash.graphs.ops.take_last import TakeLast


@every_layout
@pytest.mark.parametrize("tail", [(), (5,), (4, 32)])
def test_last_row_of_each_sequence(
    rng: np.random.Generator, layout: Layout, tail: tuple[int, ...]
) -> None:
    x = rng.normal(size=(layout.rows, *tail)).astype(np.float32)
    y = TakeLast.reference(x, layout.row_start)
    assert y.shape == (len(layout.spans), *tail)
    end = 0
    for number, span in enumerate(layout.spans):
        end += span.length
        if span.length:
            assert_same_bits(np.asarray(y[number]), np.asarray(x[end - 1]))


def test_words_of_a_mask_keep_their_type() -> None:
    mask = np.array([[1, 2], [3, 0xFFFFFFFF]], np.uint32)
    y = TakeLast.reference(mask, np.array([0, 1, 2], np.int32))  # type: ignore[arg-type]
    assert_same_bits(y, mask)


def test_it_is_a_copy(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4)).astype(np.float32)
    assert not np.shares_memory(TakeLast.reference(x, np.array([0, 3], np.int32)), x)


def test_other_rows_do_not_matter(rng: np.random.Generator) -> None:
    x = rng.normal(size=(6, 4)).astype(np.float32)
    start = np.array([0, 2, 5], np.int32)
    y = TakeLast.reference(x, start)
    x[[0, 2, 3, 5]] = np.nan
    assert_same_bits(TakeLast.reference(x, start), y)


OP = TakeLast(scratch("x", 6, 4, 32), io("r", 3), scratch("y", 2, 4, 32))


def test_launch() -> None:
    assert_launch(OP, "take_last", ("x", "r", "y"))


def test_cost() -> None:
    """Not more than all of x, not less than the rows taken."""
    y = 2 * 2 * 4 * 32
    assert y * 2 <= OP.cost().nbytes <= 3 * y + y + 4 * 3
    assert OP.cost().flops == 0
