from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from helpers.compare import Array, assert_same_bits
from helpers.layouts import Layout, Span, every_layout
from helpers.ops import assert_cost, assert_launch, io, scratch
from ultraflash.graphs.ops.draft_rows import DraftRows

NOISE = 486
I32 = npt.NDArray[np.int32]


def run(layout: Layout, token: I32, accepted: I32, block: int) -> tuple[Array, ...]:
    """ids, at, slot, text of all block rows."""
    return DraftRows.reference(
        token, accepted, layout.slot, layout.position, layout.row_start, block, NOISE
    )


def anchors(rng: np.random.Generator, layout: Layout) -> tuple[I32, I32]:
    """A token and a count of accepted drafts for every sequence."""
    token = rng.integers(3, 480, len(layout.spans))
    accepted = [rng.integers(0, max(span.length, 1)) for span in layout.spans]
    return token.astype(np.int32), np.array(accepted, np.int32)


@every_layout
@pytest.mark.parametrize("block", [1, 5, 6, 7])
def test_a_block_behind_the_last_accepted_row(
    rng: np.random.Generator, layout: Layout, block: int
) -> None:
    """Tokens [A, z, z, ...] at p+1 .. p+B, p the last accepted row (model.md 6.2)."""
    token, accepted = anchors(rng, layout)
    result = run(layout, token, accepted, block)
    ids, at, slot, text = (a.reshape(len(layout.spans), block) for a in result)
    assert not text.any()  # draft rows are no image rows
    for number, span in enumerate(layout.spans):
        assert ids[number].tolist() == [token[number], *[NOISE] * (block - 1)]
        if not span.length:
            assert (slot[number] == -1).all()
            assert (at[number] >= 0).all()
            continue
        first = span.start + accepted[number] + 1
        assert at[number].tolist() == list(range(first, first + block))
        assert (slot[number] == span.slot).all()


@pytest.mark.parametrize("accepted", range(8))
def test_every_acceptance_length(accepted: int) -> None:
    layout = Layout("eight", (Span(0, 3, 1), Span(2, 41, 8)), idle=1)
    counts = np.array([0, accepted], np.int32)
    _, at, slot, _ = run(layout, np.array([7, 9], np.int32), counts, 5)
    assert at.tolist() == [4, 5, 6, 7, 8, *range(42 + accepted, 47 + accepted)]
    assert slot.tolist() == [0] * 5 + [2] * 5


def test_rejected_rows_do_not_matter() -> None:
    """Only the first row of a sequence says where it stands."""
    layout = Layout("two", (Span(1, 20, 4),))
    token, accepted = np.array([5], np.int32), np.array([1], np.int32)
    position, slot = layout.position, layout.slot
    position[2:], slot[2:] = 999, 2
    got = DraftRows.reference(token, accepted, slot, position, layout.row_start, 5, NOISE)
    for a, b in zip(got, run(layout, token, accepted, 5), strict=True):
        assert_same_bits(a, b)


def test_types() -> None:
    layout = Layout("two", (Span(1, 20, 4), Span(0, 0, 0)))
    token = np.array([5, 0], np.int32)
    assert {a.dtype for a in run(layout, token, token * 0, 5)} == {np.dtype(np.int32)}


@every_layout
def test_sequences_stand_alone(rng: np.random.Generator, layout: Layout) -> None:
    token, accepted = anchors(rng, layout)
    whole = [a.reshape(len(layout.spans), 5) for a in run(layout, token, accepted, 5)]
    for number, span in enumerate(layout.spans):
        if not span.length:
            continue
        own = slice(number, number + 1)
        alone = run(Layout("alone", (span,)), token[own], accepted[own], 5)
        for got, want in zip(alone, whole, strict=True):
            assert_same_bits(got, want[number])


OP = DraftRows(
    io("t", 2), io("a", 2), io("s", 6), io("p", 6), io("r", 3),
    scratch("ids", 10, dtype="i32"), scratch("at", 10, dtype="i32"),
    scratch("slot", 10, dtype="i32"), scratch("text", 10, dtype="i32"), 5, 128799,
)  # fmt: skip


def test_launch() -> None:
    names = ("t", "a", "s", "p", "r", "ids", "at", "slot", "text")
    assert_launch(OP, "draft_rows", names, block=5, noise=128799)


def test_cost_is_next_to_nothing() -> None:
    assert_cost(OP, 4 * (2 + 2 + 6 + 6 + 3 + 4 * 10))
