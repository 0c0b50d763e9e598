from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import Array, assert_same_bits
from helpers.layouts import LAYOUTS, Layout, Span
from helpers.ops import assert_cost, assert_launch, io, scratch
from ultraflash.graphs.ops.last_io import LastIo

# Sequences without rows stand behind all others.
FROM_THE_FRONT = [la for la in LAYOUTS if la.name != "a_sequence_without_rows"]
FROM_THE_FRONT += [
    Layout("one_of_three", (Span(2, 9, 4), Span(0, 0, 0), Span(1, 0, 0))),
    Layout("two_of_three_and_idle", (Span(2, 9, 4), Span(0, 5, 1), Span(1, 0, 0)), idle=2),
    Layout("nobody_and_no_idle_row_but_one", (Span(0, 0, 0), Span(1, 0, 0)), idle=1),
]
front_layouts = pytest.mark.parametrize("layout", FROM_THE_FRONT, ids=lambda la: la.name)


def run(layout: Layout, ids: Array) -> tuple[Array, ...]:
    return LastIo.reference(ids, layout.slot, layout.position, layout.row_start)


@front_layouts
def test_a_step_of_one_row_a_sequence(rng: np.random.Generator, layout: Layout) -> None:
    ids = rng.integers(3, 500, layout.rows).astype(np.int32)
    last_ids, last_slot, last_position, last_start = run(layout, ids)
    count, end = len(layout.spans), 0
    assert [len(a) for a in (last_ids, last_slot, last_position, last_start)] == [count] * 3 + [
        count + 1
    ]
    for number, span in enumerate(layout.spans):
        end += span.length
        own = list(range(last_start[number], last_start[number + 1]))
        if not span.length:
            assert own == []
            assert last_slot[number] == -1
            continue
        assert own == [number]
        assert last_ids[number] == ids[end - 1]
        assert last_slot[number] == span.slot
        assert last_position[number] == span.start + span.length - 1
    assert last_start[0] == 0
    assert last_start[-1] == sum(span.length > 0 for span in layout.spans)


@front_layouts
def test_sequences_without_rows_name_possible_tokens_and_positions(layout: Layout) -> None:
    """They are computed and thrown away, so embedding and angles must not go out of bounds."""
    ids = np.arange(layout.rows, dtype=np.int32) + 7
    last_ids, _, last_position, _ = run(layout, ids)
    assert set(last_ids.tolist()) <= set(ids.tolist())
    assert set(last_position.tolist()) <= set(layout.position.tolist())


def test_types() -> None:
    layout = FROM_THE_FRONT[-2]
    assert {a.dtype for a in run(layout, np.zeros(layout.rows, np.int32))} == {np.dtype(np.int32)}


def test_a_sequence_stands_alone() -> None:
    both = Layout("two", (Span(0, 5, 3), Span(1, 40, 2)))
    ids = np.array([1, 2, 3, 4, 5], np.int32)
    whole = run(both, ids)
    for number, (span, own) in enumerate(zip(both.spans, (ids[:3], ids[3:]), strict=True)):
        for got, want in zip(run(Layout("one", (span,)), own)[:3], whole[:3], strict=True):
            assert_same_bits(got, want[number : number + 1])


def test_what_it_reads_is_left_alone() -> None:
    layout = FROM_THE_FRONT[-2]
    ids, slot = np.arange(layout.rows, dtype=np.int32), layout.slot
    result = LastIo.reference(ids, slot, layout.position, layout.row_start)
    assert ids.tolist() == list(range(layout.rows))
    assert slot.tolist() == layout.slot.tolist()
    assert not np.shares_memory(result[0], ids)


OP = LastIo(
    io("i", 6),
    io("s", 6),
    io("p", 6),
    io("r", 3),
    scratch("li", 2, dtype="i32"),
    scratch("ls", 2, dtype="i32"),
    scratch("lp", 2, dtype="i32"),
    scratch("lr", 3, dtype="i32"),
)


def test_launch() -> None:
    assert_launch(OP, "last_io", ("i", "s", "p", "r", "li", "ls", "lp", "lr"))


def test_cost_is_next_to_nothing() -> None:
    assert_cost(OP, 4 * (3 * 6 + 3 + 3 * 2 + 3))
