"""A row's neighbours and its past, against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.layouts import POSITIONS, RING, SLOTS, Layout, Span, every_layout
from helpers.properties import examples
from ultraflash.graphs.rows import first_row, looked_back


@every_layout
def test_first_row(layout: Layout) -> None:
    want, row = [], 0
    for span in layout.spans:
        want += [row] * span.length
        row += span.length
    want += range(row, layout.rows)  # idle rows are their own
    assert first_row(layout.row_start, layout.rows).tolist() == want


def assert_looks_back(layout: Layout, back: list[int], tail: tuple[int, ...] = ()) -> None:
    """Position p of a slot holds slot * 1000 + p, among this step's rows and in the ring."""
    base = (np.arange(SLOTS)[:, None] * 1000 + np.arange(POSITIONS)).astype(np.int64)
    timeline = np.broadcast_to(base.reshape(*base.shape, *(1,) * len(tail)), (*base.shape, *tail))
    garbage = np.full((SLOTS, RING, *tail), -5, np.int64)
    got = looked_back(
        layout.of(timeline), layout.ring_before(timeline, garbage), np.array(back),
        layout.slot, layout.position, layout.row_start,
    )  # fmt: skip
    assert got.shape == (layout.rows, len(back), *tail)
    for row, span, position in layout.each():
        for n, distance in enumerate(back):
            if distance <= position:
                assert (got[row, n] == span.slot * 1000 + position - distance).all()


@every_layout
@pytest.mark.parametrize("back", [[0], [1], [0, 1, 2, 3], [15, 8, 0], [16]])
@pytest.mark.parametrize("tail", [(), (3,), (2, 2)])
def test_looked_back(layout: Layout, back: list[int], tail: tuple[int, ...]) -> None:
    assert_looks_back(layout, back, tail)


@st.composite
def layouts(draw: Any) -> Layout:
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    spans = tuple(
        Span(slot, draw(st.integers(0, POSITIONS - 30)), draw(st.integers(0, 30))) for slot in slots
    )
    return Layout("drawn", spans, idle=draw(st.integers(0, 3)))


@examples(150)
@given(layout=layouts(), back=st.lists(st.integers(0, RING), min_size=1, max_size=5))
def test_looked_back_on_any_layout(layout: Layout, back: list[int]) -> None:
    if layout.rows:
        assert_looks_back(layout, back)
