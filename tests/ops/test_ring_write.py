from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import Array, assert_same_bits
from helpers.layouts import LAYOUTS, POSITIONS, RING, SLOTS, Layout, Span, every_layout
from helpers.ops import assert_cost, assert_launch, io, scratch, state
from ultraflash.graphs.ops.ring_write import RingWrite


@every_layout
@pytest.mark.parametrize(
    ("tail", "dtype"), [((), np.int32), ((4,), np.float32), ((2, 3), np.uint8)]
)
def test_the_last_rows_of_each_sequence_end_at_position_mod_size(
    rng: np.random.Generator, layout: Layout, tail: tuple[int, ...], dtype: type
) -> None:
    timeline: Array = rng.integers(0, 200, size=(SLOTS, POSITIONS, *tail)).astype(dtype)
    ring: Array = rng.integers(0, 200, size=(SLOTS, RING, *tail)).astype(dtype)
    value = layout.of(timeline, idle=201)
    want = ring.copy()
    for _, span, position in layout.each():  # in order: a later row of a place wins
        want[span.slot, position % RING] = timeline[span.slot, position]
    got = RingWrite.reference(value, ring, layout.slot, layout.position, layout.row_start)
    assert got is None  # the ring is changed in place
    assert_same_bits(ring, want)


def test_idle_rows_touch_nothing() -> None:
    """Slot -1 must not be read as the last slot."""
    ring = np.zeros((2, RING, 1), np.float32)
    layout = Layout("idle", (Span(0, 3, 1),), idle=5)
    value = np.ones((6, 1), np.float32)
    RingWrite.reference(value, ring, layout.slot, layout.position, layout.row_start)
    assert ring[1].sum() == 0
    assert ring[0].sum() == 1


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.active > 1], ids=lambda la: la.name)
def test_row_by_row_gives_the_same_ring(rng: np.random.Generator, layout: Layout) -> None:
    timeline = rng.normal(size=(SLOTS, POSITIONS, 4)).astype(np.float32)
    whole, single = np.zeros((2, SLOTS, RING, 4), np.float32)
    for ring, layouts in ((whole, [layout]), (single, [alone for _, alone in layout.steps()])):
        for la in layouts:
            RingWrite.reference(la.of(timeline), ring, la.slot, la.position, la.row_start)
    assert_same_bits(single, whole)


def test_a_second_part_goes_the_same_way(rng: np.random.Generator) -> None:
    layout = LAYOUTS[-1]
    values = [rng.normal(size=(SLOTS, POSITIONS, n)).astype(np.float32) for n in (4, 2)]
    both, alone = ([np.zeros((SLOTS, RING, n), np.float32) for n in (4, 2)] for _ in range(2))
    value, second = map(layout.of, values)
    where = layout.slot, layout.position, layout.row_start
    RingWrite.reference(value, both[0], *where, second, both[1])
    RingWrite.reference(value, alone[0], *where)
    RingWrite.reference(second, alone[1], *where)
    for got, want in zip(both, alone, strict=True):
        assert_same_bits(got, want)


OP = RingWrite(
    scratch("v", 6, 512, dtype="u8"),
    state("ring", 3, 256, 512),
    io("s", 6),
    io("p", 6),
    io("r", 3),
    scratch("v2", 6, 16, dtype="u8"),
    state("ring2", 3, 256, 16),
)


def test_launch() -> None:
    assert_launch(OP, "ring_write", ("v", "ring", "s", "p", "r", "v2", "ring2"))


def test_cost_is_the_rows_in_and_out() -> None:
    assert_cost(OP, 2 * 6 * (512 + 16) + 4 * (6 + 6 + 3))
