from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from helpers.compare import Array
from helpers.layouts import SLOTS, Layout, every_layout
from helpers.ops import assert_cost, assert_launch, io, state
from ultraflash.graphs.ops.follow_rows import FollowRows
from ultraflash.graphs.width import COMPETES, KNOTS, LOW, PER_LOGIT, Rule

T = TypeVar("T")
B, ROWS = 5, 12
SURE, HOPELESS = 8.0, -8.0  # confidences: all drafts stay, none does
PRICE = np.full(ROWS, 0.3, np.float32)
RAW = np.tile((1 / (1 + np.exp(-KNOTS))).astype(np.float32), (B, 1))
EOS = 1


class Step:
    """A step's io and the slots' last steps, with rubbish wherever the operation has to write."""

    def __init__(self, rng: np.random.Generator, follows: list[int], rows: int, block: int) -> None:
        count = len(follows)
        self.block, self.follows = block, np.array(follows, np.int32)
        self.end = np.full(count, 10_000, np.int32)
        self.ban, self.ban_end = np.full(count, EOS, np.int32), np.zeros(count, np.int32)
        self.own = np.full(count, COMPETES, np.int32)
        self.threshold, self.price = np.full(block, 0.5, np.float32), PRICE[:rows]
        self.chance = np.stack([RAW[:block], RAW[:block]])
        self.next_ids = rng.integers(3, 480, (SLOTS, 1 + block)).astype(np.int32)
        self.next_at = rng.integers(1000, 2000, (SLOTS, 2)).astype(np.int32)
        self.confidence = np.full((SLOTS, block), HOPELESS, np.float32)
        self.row_start = rng.integers(0, 9, count + 1).astype(np.int32)
        self.slot, self.ids, self.position, self.banned = (
            rng.integers(500, 600, rows).astype(np.int32) for _ in range(4)
        )
        self.step = rng.integers(500, 600, count).astype(np.int32)

    def run(self) -> list[int]:
        def drafts(value: T) -> T | None:
            return value if self.block else None

        kept = FollowRows.reference(
            self.follows, self.end, self.ban, self.ban_end, drafts(self.own),
            drafts(self.threshold), drafts(self.chance), drafts(self.price), self.next_ids,
            self.next_at, drafts(self.confidence), self.row_start, self.slot, self.ids,
            self.position, self.banned, self.step, LOW, PER_LOGIT,
        )  # fmt: skip
        assert kept.dtype == np.int32
        found: list[int] = kept.tolist()
        return found

    def assert_laid_out(self, kept: list[int]) -> None:
        """Every sequence's anchor and its first drafts, one after the other, then idle rows."""
        rows: list[tuple[int, ...]] = []
        for s, (slot, count) in enumerate(zip(self.follows.tolist(), kept, strict=True)):
            assert self.row_start[s] == len(rows)
            for i in range(1 + count):
                at = int(self.next_at[slot, 0]) + i
                banned = EOS if at < self.ban_end[s] else -1
                rows.append((slot, int(self.next_ids[slot, i]), at, banned))
            assert self.step[s] == self.next_at[slot, 1]
        assert self.row_start[-1] == len(rows)
        rows += [(-1, 0, 0, -1)] * (len(self.ids) - len(rows))
        found = np.stack([self.slot, self.ids, self.position, self.banned], axis=1)
        assert [tuple(row) for row in found.tolist()] == rows


@pytest.mark.parametrize("follows", [[1], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("block", [0, 1, B])
def test_sequences_go_on_with_the_drafts_that_are_likely(
    rng: np.random.Generator, follows: list[int], block: int
) -> None:
    step = Step(rng, follows, ROWS, block)
    step.confidence[follows[-1], :2] = SURE
    kept = step.run()
    assert kept == [*[0] * (len(follows) - 1), min(2, block)]
    step.assert_laid_out(kept)


def test_all_is_the_rules_decision(rng: np.random.Generator) -> None:
    """Random numbers, against what the host would decide."""
    seen = set()
    for _ in range(200):
        step = Step(rng, [2, 0], int(rng.integers(6, ROWS + 1)), B)
        step.own[:] = rng.integers(-1, 3, 2)
        step.end[:] = step.next_at[step.follows, 0] + rng.integers(0, 9, 2)
        step.confidence[:] = rng.normal(1.5, 2, (SLOTS, B))
        rule = Rule(step.chance, step.threshold, step.price, step.own)
        room = np.clip(step.end - step.next_at[step.follows, 0] - 2, 0, B)
        want = rule.kept(step.confidence[step.follows], room, len(step.ids)).tolist()
        kept = step.run()
        assert kept == want
        step.assert_laid_out(kept)
        seen.add(tuple(kept))
    assert len(seen) > 12


def test_no_draft_behind_the_end(rng: np.random.Generator) -> None:
    """A draft, and the token behind it."""
    for left, want in ((0, 0), (1, 0), (2, 0), (3, 1), (6, 4), (7, B), (99, B)):
        step = Step(rng, [1], ROWS, B)
        step.confidence[:] = SURE
        step.end[0] = step.next_at[1, 0] + left
        kept = step.run()
        assert kept == [want]
        step.assert_laid_out(kept)


def test_a_ban_ends_at_its_position(rng: np.random.Generator) -> None:
    step = Step(rng, [1, 0], ROWS, B)
    step.confidence[:] = SURE
    step.ban_end[:] = step.next_at[[1, 0], 0] + [2, 0]
    step.assert_laid_out(step.run())
    assert step.banned.tolist().count(EOS) == 2


@every_layout
def test_the_hosts_step_stays_as_it_is(rng: np.random.Generator, layout: Layout) -> None:
    step = Step(rng, [-1] * len(layout.spans), layout.rows, B)
    step.row_start = layout.row_start
    before = [a.copy() for a in host_side(step)]
    assert step.run() == [max(span.length - 1, 0) for span in layout.spans]
    for got, want in zip(host_side(step), before, strict=True):
        assert got.tolist() == want.tolist()


def host_side(step: Step) -> list[Array]:
    return [step.row_start, step.slot, step.ids, step.position, step.banned, step.step]


OP = FollowRows(
    io("f", 2), io("e", 2), io("b", 2), io("be", 2), io("o", 2), io("t", 5, dtype="f32"),
    io("c", 2, 5, 65, dtype="f32"), io("pr", 6, dtype="f32"),
    state("ids", 9, 6, dtype="i32"), state("at", 9, 2, dtype="i32"), state("nc", 9, 5, dtype="f32"),
    io("r", 3), io("s", 6), io("i", 6), io("p", 6), io("ba", 6), io("n", 2), io("k", 2),
    LOW, PER_LOGIT,
)  # fmt: skip
PLAIN = replace(
    OP, own=None, threshold=None, chance=None, price=None, next_confidence=None,
    next_ids=state("ids", 9, 1, dtype="i32"),
)  # fmt: skip


def test_launch() -> None:
    names = [
        "f",
        "e",
        "b",
        "be",
        "o",
        "t",
        "c",
        "pr",
        "ids",
        "at",
        "nc",
        "r",
        "s",
        "i",
        "p",
        "ba",
        "n",
        "k",
    ]
    assert_launch(OP, "follow_rows", tuple(names), low=LOW, per_logit=PER_LOGIT)


@pytest.mark.parametrize("op", [OP, PLAIN], ids=["drafting", "plain"])
def test_shared_memory_holds_chances_and_two_numbers_a_sequence(op: FollowRows) -> None:
    block = op.next_ids.shape[1] - 1
    assert op.geometry().shared == 4 * 2 * (2 * block + 2)


def test_cost_is_next_to_nothing() -> None:
    io_values = 4 * 2 + 2 + 5 + 2 * 5 * 65 + 6 + 3 + 4 * 6 + 2 + 2
    assert_cost(OP, 4 * (io_values + 2 * (6 + 2 + 5)))
