from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.formats import F32, U8, quantise
from helpers.layouts import LAYOUTS, POSITIONS, SLOTS, Layout, every_layout
from helpers.ops import assert_cost, assert_launch, io, scratch, state
from helpers.values import activations, angles
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.ops.store_index_key import StoreIndexKey

DIM, PAIRS = 64, 8


def run(layout: Layout, key: F32, angle: tuple[F32, F32], ratio: int, store: tuple[U8, U8]) -> None:
    """Idle rows carry a key as well: it must go nowhere."""
    cos, sin = (layout.of(a, idle=1) for a in angle)
    got = StoreIndexKey.reference(
        layout.of(key, idle=3), cos, sin, layout.slot, layout.position, *store, ratio
    )
    assert got is None  # the store is changed in place


def timelines(rng: np.random.Generator) -> tuple[F32, tuple[F32, F32]]:
    key = activations(rng, SLOTS, POSITIONS, DIM, spread=4)
    cos, sin = (a.reshape(SLOTS, POSITIONS, PAIRS) for a in angles(rng, SLOTS * POSITIONS, PAIRS))
    return key, (cos, sin)


def empty(ratio: int) -> tuple[U8, U8]:
    entries = -(-POSITIONS // ratio)
    return (
        np.full((SLOTS, entries, DIM // 2), 0xAB, np.uint8),
        np.full((SLOTS, entries, DIM // 32), 0xCD, np.uint8),
    )


@every_layout
@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_of_completed_groups_and_nothing_else(
    rng: np.random.Generator, layout: Layout, ratio: int
) -> None:
    key, (cos, sin) = timelines(rng)
    store, want = empty(ratio), empty(ratio)
    run(layout, key, (cos, sin), ratio, store)
    for _, span, position in layout.each():
        if (position + 1) % ratio:
            continue  # the group is not complete
        at = span.slot, position
        # Given the rotated bf16 values (test_rope.py), bytes are exact.
        turned = rotate(key[at][None], cos[at][None], sin[at][None])
        codes, scales, _ = quantise("qmx4", turned)
        want[0][span.slot, position // ratio] = codes[0, 0::2] + 16 * codes[0, 1::2]
        want[1][span.slot, position // ratio] = scales[0]
    for got, exact in zip(store, want, strict=True):
        assert_same_bits(got, exact)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.active > 1], ids=lambda la: la.name)
def test_rows_stand_alone(rng: np.random.Generator, layout: Layout, ratio: int) -> None:
    key, angle = timelines(rng)
    whole, single = empty(ratio), empty(ratio)
    run(layout, key, angle, ratio, whole)
    for _, alone in layout.steps():
        run(alone, key, angle, ratio, single)
    for got, exact in zip(single, whole, strict=True):
        assert_same_bits(got, exact)


def op(rows: int) -> StoreIndexKey:
    """The release's layer 20."""
    return StoreIndexKey(
        scratch("k", rows, 128),
        scratch("c", rows, 32, dtype="f32"),
        scratch("s", rows, 32, dtype="f32"),
        io("slot", rows),
        io("p", rows),
        state("codes", 2, 1000, 64),
        state("scales", 2, 1000, 4),
        1,
    )


def test_launch() -> None:
    assert_launch(
        op(3), "store_index_key", ("k", "c", "s", "slot", "p", "codes", "scales"), ratio=1
    )


def test_cost() -> None:
    """68 bytes an entry (model.md 4.12)."""
    assert_cost(op(6), 6 * (2 * 128 + 2 * 4 * 32 + 4 + 4 + 68))


def test_an_op_that_only_updates_state_has_no_result() -> None:
    assert [ref.name for ref in op(1).writes()] == ["codes", "scales"]
    assert {"codes", "scales"} <= {ref.name for ref in op(1).reads()}
