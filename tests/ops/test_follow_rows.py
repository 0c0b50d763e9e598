from __future__ import annotations

import numpy as np

from helpers.compare import Array
from helpers.layouts import SLOTS, Layout, Span, every_layout
from helpers.ops import assert_cost, assert_launch, io, state
from ultraflash.graphs.ops.follow_rows import FollowRows

WIDEST = 16  # ids kept of a slot: more rows than any layout gives a sequence


def followed(
    layout: Layout, follows: list[int], rng: np.random.Generator, width: int = WIDEST
) -> tuple[Array, ...]:
    """(next_ids, next_at, then ids, position and step of the host, and the same afterwards)."""
    next_ids = rng.integers(3, 480, (SLOTS, width)).astype(np.int32)
    next_at = rng.integers(1000, 2000, (SLOTS, 2)).astype(np.int32)
    host = (
        rng.integers(500, 600, layout.rows).astype(np.int32),
        layout.position,
        rng.integers(500, 600, len(layout.spans)).astype(np.int32),
    )
    ids, position, step = (a.copy() for a in host)
    switch = np.array(follows, np.int32)
    rest = next_ids, next_at, ids, position, step
    FollowRows.reference(switch, layout.row_start, layout.slot, *rest)
    return next_ids, next_at, *host, ids, position, step


@every_layout
def test_sequences_that_go_on(rng: np.random.Generator, layout: Layout) -> None:
    """Every second one; the others are the host's, as are idle rows."""
    follows = [s % 2 for s in range(len(layout.spans))]
    next_ids, next_at, *host, ids, position, step = followed(layout, follows, rng)
    host_ids, host_position, host_step = (a.copy() for a in host)
    at = 0
    for s, span in enumerate(layout.spans):
        own = slice(at, at + span.length)
        if follows[s] and span.length:
            host_ids[own] = next_ids[span.slot, : span.length]
            host_position[own] = next_at[span.slot, 0] + np.arange(span.length)
            host_step[s] = next_at[span.slot, 1]
        at = own.stop
    assert ids.tolist() == host_ids.tolist()
    assert position.tolist() == host_position.tolist()
    assert step.tolist() == host_step.tolist()


@every_layout
def test_nobody_goes_on_unless_the_host_says_so(rng: np.random.Generator, layout: Layout) -> None:
    _, _, *host, ids, position, step = followed(layout, [0] * len(layout.spans), rng)
    for got, want in zip((ids, position, step), host, strict=True):
        assert got.tolist() == want.tolist()


def test_rows_that_nothing_was_kept_for_are_the_hosts(rng: np.random.Generator) -> None:
    """Their ids would be those of another slot."""
    layout = Layout("five", (Span(2, 20, 5),))
    next_ids, next_at, host_ids, host_position, _, ids, position, _ = followed(layout, [1], rng, 3)
    assert ids.tolist() == [*next_ids[2], *host_ids[3:]]
    assert position.tolist() == [*(next_at[2, 0] + np.arange(3)), *host_position[3:]]


OP = FollowRows(
    io("f", 2), io("r", 3), io("s", 6),
    state("ids", 9, 6, dtype="i32"), state("at", 9, 2, dtype="i32"),
    io("i", 6), io("p", 6), io("n", 2),
)  # fmt: skip


def test_launch() -> None:
    assert_launch(OP, "follow_rows", ("f", "r", "s", "ids", "at", "i", "p", "n"))


def test_cost_is_next_to_nothing() -> None:
    assert_cost(OP, 4 * (2 * 2 + 3 + 3 * 6 + 2 * (6 + 2)))
