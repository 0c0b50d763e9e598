from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import Array, assert_same_bits
from helpers.layouts import LAYOUTS, POSITIONS, RING, SLOTS, Layout, Span, every_layout
from helpers.ops import assert_cost, assert_launch, io, scratch, state
from ultraflash.graphs.ops.ring_read import RingRead
from ultraflash.graphs.ops.ring_write import RingWrite

KINDS = pytest.mark.parametrize(
    ("tail", "dtype"), [((), np.int32), ((4, 8), np.float32), ((3,), np.uint8)]
)


def some(rng: np.random.Generator, dtype: type, *shape: int) -> Array:
    values: Array = rng.integers(0, 200, size=shape).astype(dtype)
    return values


@every_layout
@KINDS
def test_the_row_at_position_mod_size(
    rng: np.random.Generator, layout: Layout, tail: tuple[int, ...], dtype: type
) -> None:
    ring = some(rng, dtype, SLOTS, RING, *tail)
    y = RingRead.reference(ring, layout.slot, layout.position)
    assert y.dtype == ring.dtype
    assert y.shape == (layout.rows, *tail)
    for row, span, position in layout.each():
        assert_same_bits(np.asarray(y[row]), np.asarray(ring[span.slot, position % RING]))


@pytest.mark.parametrize("start", [0, 1, 5, 13, 16, 31, 40])
@pytest.mark.parametrize("length", [1, 7, RING])
@KINDS
def test_it_finds_what_a_chunk_left(
    rng: np.random.Generator, start: int, length: int, tail: tuple[int, ...], dtype: type
) -> None:
    """A ring holds the latest rows, in whatever chunks they came."""
    timeline = some(rng, dtype, SLOTS, POSITIONS, *tail)
    ring = some(rng, dtype, SLOTS, RING, *tail)
    for first, end in ((0, start // 2), (start // 2, start), (start, start + length)):
        step = Layout("chunk", (Span(1, first, end - first),), idle=2)
        RingWrite.reference(step.of(timeline), ring, step.slot, step.position, step.row_start)
    again = Layout("replay", (Span(1, start, length),), idle=3)
    y = RingRead.reference(ring, again.slot, again.position)
    assert_same_bits(y[:length], timeline[1, start : start + length])


def test_it_is_a_copy(rng: np.random.Generator) -> None:
    """The ring is written again while the rows are still in use."""
    ring, layout = some(rng, np.float32, SLOTS, RING, 4), LAYOUTS[3]
    y = RingRead.reference(ring, layout.slot, layout.position)
    before = y.copy()
    ring += np.float32(1)
    assert_same_bits(y, before)


def test_idle_rows_are_finite(rng: np.random.Generator) -> None:
    ring, layout = some(rng, np.float32, SLOTS, RING, 4), Layout("idle", (Span(0, 0, 0),), idle=4)
    assert np.isfinite(RingRead.reference(ring, layout.slot, layout.position)).all()


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.active > 1], ids=lambda la: la.name)
def test_rows_stand_alone(rng: np.random.Generator, layout: Layout) -> None:
    ring = some(rng, np.float32, SLOTS, RING, 4)
    whole = RingRead.reference(ring, layout.slot, layout.position)
    for row, alone in layout.steps():
        assert_same_bits(RingRead.reference(ring, alone.slot, alone.position), whole[row])


OP = RingRead(state("ring", 3, 256, 4, 5120, dtype="bf16"), io("s", 6), io("p", 6),
              scratch("y", 6, 4, 5120))  # fmt: skip


def test_launch() -> None:
    assert_launch(OP, "ring_read", ("ring", "s", "p", "y"))


def test_cost_is_the_rows_in_and_out() -> None:
    assert_cost(OP, 2 * 6 * 2 * 4 * 5120 + 4 * (6 + 6))
