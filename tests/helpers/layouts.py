"""Ways to lay sequences out in a step's rows, and what stands at every position of every slot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[Any]
I32 = npt.NDArray[np.int32]

SLOTS = 3
POSITIONS = 96  # every layout below stays under this
RING = 16  # rows of a ring in tests: short, so that it wraps


@dataclass(frozen=True)
class Span:
    """`length` rows of one sequence, at positions `start`, `start + 1`, ... of `slot`."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """The rows of one step: spans one after the other, then idle rows."""

    name: str
    spans: tuple[Span, ...]
    idle: int = 0

    @property
    def active(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def rows(self) -> int:
        return self.active + self.idle

    @property
    def slot(self) -> I32:
        real = [span.slot for span in self.spans for _ in range(span.length)]
        return np.array([*real, *[-1] * self.idle], np.int32)

    @property
    def position(self) -> I32:
        real = [span.start + i for span in self.spans for i in range(span.length)]
        return np.array([*real, *[0] * self.idle], np.int32)

    @property
    def row_start(self) -> I32:
        return np.cumsum([0, *(span.length for span in self.spans)]).astype(np.int32)

    def each(self) -> Iterator[tuple[int, Span, int]]:
        """(row, span, position) of every active row."""
        row = 0
        for span in self.spans:
            for i in range(span.length):
                yield row, span, span.start + i
                row += 1

    def of(self, timeline: Array, idle: Any = 0) -> Array:
        """This step's rows of `timeline`, [slots, positions, ...]; idle rows hold `idle`."""
        rows = np.full((self.rows, *timeline.shape[2:]), idle, timeline.dtype)
        for row, span, position in self.each():
            rows[row] = timeline[span.slot, position]
        return rows

    def ring_before(self, timeline: Array, garbage: Array, size: int = RING) -> Array:
        """A ring [slots, size, ...] after everything before this step; `garbage` elsewhere."""
        ring = garbage[:, :size].copy()
        for span in self.spans:
            for position in range(max(0, span.start - size), span.start):
                ring[span.slot, position % size] = timeline[span.slot, position]
        return ring

    def steps(self) -> Iterator[tuple[npt.NDArray[np.intp], Layout]]:
        """The same rows one at a time: (which row, its layout of one row)."""
        for row, span, position in self.each():
            yield np.array([row]), Layout(f"{self.name}.{row}", (Span(span.slot, position, 1),))


LAYOUTS = (
    Layout("first_token", (Span(0, 0, 1),)),
    Layout("one_row_far_in", (Span(1, 77, 1),)),
    Layout("one_row_at_odd_start", (Span(2, 1, 1),)),
    Layout("prompt_start", (Span(0, 0, 7),)),
    Layout("chunk_across_the_ring_edge", (Span(1, 13, 9),)),
    Layout("chunk_longer_than_the_ring", (Span(2, 21, 37),)),
    Layout("prompt_longer_than_the_ring", (Span(0, 0, 41),)),
    Layout("ragged_three", (Span(2, 31, 2), Span(0, 0, 5), Span(1, 64, 1))),
    Layout("ragged_with_idle_rows", (Span(1, 7, 3), Span(2, 48, 4)), idle=3),
    Layout("a_sequence_without_rows", (Span(0, 5, 2), Span(1, 9, 0), Span(2, 15, 1)), idle=1),
    Layout("sixteen_single_rows", tuple(Span(i % 3, 20 + i // 3, 1) for i in (0, 1, 2)), idle=13),
    Layout("nobody", (Span(0, 0, 0),), idle=4),
)

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])
