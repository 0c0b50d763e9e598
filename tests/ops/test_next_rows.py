from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import Array
from helpers.layouts import SLOTS, Layout, Span, every_layout
from helpers.ops import assert_cost, assert_launch, io, state
from ultraflash.graphs.ops.next_rows import NextRows

BLOCK = 5


def kept(layout: Layout, rng: np.random.Generator, block: int = BLOCK) -> tuple[Array, ...]:
    """token, accepted, drafts, confidence, step that went in, and the slots before and after."""
    count = len(layout.spans)
    token, step = (rng.integers(3, 480, count).astype(np.int32) for _ in range(2))
    most = [max(span.length, 1) for span in layout.spans]
    accepted = rng.integers(0, most).astype(np.int32)
    drafts = rng.integers(3, 480, (count, block)).astype(np.int32)
    confidence = rng.normal(size=(count, block)).astype(np.float32)
    before = (
        rng.integers(500, 600, (SLOTS, 1 + block)).astype(np.int32),
        rng.integers(500, 600, (SLOTS, 2)).astype(np.int32),
        rng.normal(size=(SLOTS, block)).astype(np.float32),
    )
    ids, at, sure = before[0].copy(), before[1].copy(), before[2].copy()
    some = block > 0
    NextRows.reference(
        token, accepted, drafts if some else None, confidence if some else None, layout.slot,
        layout.position, layout.row_start, step, ids, at, sure if some else None,
    )  # fmt: skip
    return token, accepted, drafts, confidence, step, *before, ids, at, sure


@every_layout
@pytest.mark.parametrize("block", [0, 1, BLOCK])
def test_the_token_and_its_drafts_behind_the_last_accepted_row(
    rng: np.random.Generator, layout: Layout, block: int
) -> None:
    token, accepted, drafts, confidence, step, *_, ids, at, sure = kept(layout, rng, block)
    for s, span in enumerate(layout.spans):
        if span.length:
            assert ids[span.slot].tolist() == [token[s], *drafts[s]]
            assert sure[span.slot].tolist() == confidence[s].tolist()
            assert at[span.slot].tolist() == [span.start + accepted[s] + 1, step[s] + 1]


@every_layout
def test_slots_without_rows_keep_what_they_have(rng: np.random.Generator, layout: Layout) -> None:
    *_, ids_before, at_before, sure_before, ids, at, sure = kept(layout, rng)
    others = sorted(set(range(SLOTS)) - {span.slot for span in layout.spans if span.length})
    assert ids[others].tolist() == ids_before[others].tolist()
    assert at[others].tolist() == at_before[others].tolist()
    assert sure[others].tolist() == sure_before[others].tolist()


def test_rejected_rows_do_not_matter() -> None:
    """Only the first row of a sequence says where it stands."""
    layout = Layout("one", (Span(1, 20, 4),))
    slot, position = layout.slot, layout.position
    slot[1:], position[1:] = 2, 999
    ids, at = np.zeros((SLOTS, 1), np.int32), np.zeros((SLOTS, 2), np.int32)
    one = np.array([2], np.int32)
    rest = slot, position, layout.row_start, one, ids, at
    NextRows.reference(one, one, None, None, *rest, None)
    assert at.tolist() == [[0, 0], [23, 3], [0, 0]]


OP = NextRows(
    io("t", 2), io("a", 2), io("d", 2, 5), io("c", 2, 5, dtype="f32"),
    io("s", 6), io("p", 6), io("r", 3), io("n", 2),
    state("ids", 9, 6, dtype="i32"), state("at", 9, 2, dtype="i32"), state("nc", 9, 5, dtype="f32"),
)  # fmt: skip


def test_launch() -> None:
    assert_launch(OP, "next_rows", ("t", "a", "d", "c", "s", "p", "r", "n", "ids", "at", "nc"))


def test_cost_is_next_to_nothing() -> None:
    assert_cost(OP, 4 * (3 * 2 + 2 * 2 * 5 + 2 * 6 + 3 + 2 * (6 + 2 + 5)))
