"""The draft plan inside the decode plan (model.md 5.3, 6; architecture.md 3): what a block may see,
what may change it, and what steps leave behind.

Acceptance is forced here: a step's rows are the right continuation and then wrong tokens, and the
plan is told between `accept` and what follows how many drafts stayed. tiny-a has a window of 16 and
rings of 64.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from helpers.drafting import Behind, DraftRig, assert_same_result
from helpers.rig import assert_bits, assert_same_bits
from ultraflash.graphs.draw import pick
from ultraflash.graphs.philox import Purpose, uniform
from ultraflash.graphs.sampling import distribution
from ultraflash.graphs.verify import block_verify, verify_draws
from ultraflash.runtime.backend import Array
from ultraflash.runtime.step_io import Draw, Part, write_step

BLOCKS = (5, 6, 7)
IDS: list[int] = np.random.default_rng(4).integers(3, 480, 150).tolist()
OTHER: list[int] = np.random.default_rng(5).integers(3, 480, 150).tolist()
SAMPLED = Draw(temperature=1.3, top_p=0.9, seed=77, step=3)
every_block = pytest.mark.parametrize("block", BLOCKS)
draws = pytest.mark.parametrize("draw", [Draw(), SAMPLED], ids=["greedy", "sampled"])


@functools.cache
def rig(block: int) -> DraftRig:
    return DraftRig(block)


def wrong(ids: list[int], seed: int = 0) -> list[int]:
    """Other tokens than these, at every place."""
    by = np.random.default_rng(seed).integers(1, 470, len(ids)).tolist()
    return [3 + (token - 3 + more) % 477 for token, more in zip(ids, by, strict=True)]


def verified(rows: int, accepted: int, start: int, seed: int = 0) -> list[int]:
    """A step's tokens at `start`: the anchor, `accepted` right drafts, wrong ones."""
    right = IDS[start : start + 1 + accepted]
    return right + wrong(IDS[start + 1 + accepted : start + rows], seed)


# --- what a block sees ---


def intervened(rig: DraftRig, name: str, change: Array, span: str, start: int = 40) -> Array:
    """The draft's streams of every stage when `name` is changed behind the nodes of `span`."""
    runner = rig.decoder(1)
    part = Part(0, start, IDS[start : start + 1])
    rig.ran(runner, part)
    split = runner.plan.span(span).stop
    runner.run(slice(0, split))
    runner.write(name, runner.read(name) * change)
    runner.run(slice(split, len(runner.plan.nodes)))
    return np.stack([runner.read(f"draft.stage{n}.X") for n in range(rig.model.draft_stages)])


@every_block
def test_every_row_of_a_block_sees_every_row(block: int) -> None:
    """Already in the first stage, later rows included: a block is not causal."""
    r = rig(block)
    r.prefill(0, IDS[:40])
    same = intervened(r, "draft.x", np.ones((block, 1, 1), np.float32), "draft.embed")
    for row in range(block):
        change = np.ones((block, 1, 1), np.float32)
        change[row] = 1.5
        streams = intervened(r, "draft.x", change, "draft.embed")
        assert (streams[0] != same[0]).any(axis=(1, 2)).all(), row


@every_block
@pytest.mark.parametrize("at", [9, 70])
def test_every_row_of_a_block_sees_the_same_window(block: int, at: int) -> None:
    """The 16 rows up to the last accepted one; neither older ones nor what was rejected."""
    r = rig(block)
    rows = 5
    part = Part(0, at, verified(rows, 1, at))
    r.prefill(0, IDS[:at])
    forced(r, [part], [1], [IDS[at + 2]])
    runner, last = r.decoder(rows), at + 1
    span = runner.plan.span("draft")
    ring, size = r.backend._state[0]["draft.stage0.ring_codes"], r.capacity.ring(r.model)

    def streams() -> Array:
        runner.run(span)
        return runner.read("draft.stage0.X").copy()

    same = streams()
    for position in range(last - 20, last + 5):
        kept = ring[0, position % size].copy()
        ring[0, position % size] ^= 0x80  # all signs
        seen = (streams() != same).any(axis=(1, 2))
        ring[0, position % size] = kept
        inside = max(0, last - r.model.window + 1) <= position <= last
        assert seen.all() if inside else not seen.any(), position


@every_block
def test_a_block_of_another_size_proposes_otherwise(block: int) -> None:
    """Its rows see each other, so widening it is not only appending."""
    wider = block % 7 + 5 if block == 7 else block + 1
    mine, other = rig(block).prefill(0, IDS[:50]), rig(wider).prefill(0, IDS[:50])
    assert (len(mine.drafts), len(other.drafts)) == (block, wider)
    assert mine.token == other.token
    assert_bits(mine.logits, other.logits, "the target does not know")
    both = min(block, wider)
    assert (mine.confidence[:both] != other.confidence[:both]).all()


def test_behind_a_single_token() -> None:
    """The window is that one row (model.md 6.2: defined at p = 0 too)."""
    behind = rig(5).prefill(1, IDS[:1])
    again = rig(5).decode(Part(2, 0, IDS[:1]))[0]
    assert_same_result(again, behind)


# --- what may not change a block ---


def forced(
    rig: DraftRig, parts: list[Part], accepted: list[int], tokens: list[int], rows: int = 0
) -> list[Behind]:
    """A decode step that goes on as if so many drafts had stayed, with these tokens behind."""
    count = rows or sum(len(part.ids) for part in parts)
    runner = rig.decoder(count, len(parts))
    write_step(runner, parts)
    split = runner.plan.span("accept").stop
    runner.run(slice(0, split))
    runner.write("io.accepted", np.array(accepted))
    runner.write("io.token", np.array(tokens))
    runner.run(slice(split, len(runner.plan.nodes)))
    return rig.results(runner, *parts)


def assert_same_block(got: Behind, want: Behind, where: str) -> None:
    assert got.drafts == want.drafts, where
    assert_bits(got.confidence, want.confidence, f"{where} confidence")


@pytest.mark.parametrize(
    ("block", "start", "draw"),
    [(5, 14, SAMPLED), (5, 61, Draw()), (6, 14, Draw()), (7, 61, SAMPLED)],
    ids=["5 sampled", "5 greedy", "6 greedy", "7 sampled"],
)
def test_rejected_rows_never_change_the_next_block(block: int, start: int, draw: Draw) -> None:
    """As many rows as there are, whatever stood in those that were rejected."""
    r = rig(block)
    r.prefill(0, IDS[:start])
    for accepted in range(block + 1):
        token = IDS[start + accepted + 1]
        blocks = []
        for rows in sorted({1 + accepted, min(2 + accepted, block + 1), block + 1}):
            # Behind the first step, what it rejected stands in the rings as well.
            part = Part(0, start, verified(rows, accepted, start, rows), draw)
            (got,) = forced(r, [part], [accepted], [token])
            blocks.append((got, r.drawn_from(0)))
        for got, q in blocks[1:]:
            assert_same_block(got, blocks[0][0], f"{accepted} accepted")
            assert_bits(q, blocks[0][1], f"q behind {accepted} accepted")


@draws
def test_neighbours_and_idle_rows_do_not_change_a_block(draw: Draw) -> None:
    """Ragged sequences in any order, wider plans, other draws beside it."""
    r, start = rig(5), 33
    part = Part(0, start, verified(4, 2, start), draw)
    r.prefill(0, IDS[:start])
    (want,) = forced(r, [part], [2], [7])
    q = r.drawn_from(0)
    other = Part(2, 20, OTHER[20:23], SAMPLED._replace(temperature=2.0, seed=5))
    third = Part(1, 50, OTHER[50:51])
    for number, parts in enumerate(([other, part], [part, other], [third, part, other])):
        r.prefill(2, OTHER[:20])
        r.prefill(1, OTHER[:50])
        r.prefill(0, IDS[:start])
        accepted = [2 if p is part else 0 for p in parts]
        got = forced(r, parts, accepted, [7] * len(parts), rows=12)
        mine = next(n for n, p in enumerate(parts) if p is part)
        assert_same_block(got[mine], want, f"among {number}")
        assert_bits(r.drawn_from(0), q, f"q among {number}")


@draws
def test_idle_sequences_touch_no_slot(draw: Draw) -> None:
    r = rig(5)
    for slot in range(4):
        r.prefill(slot, OTHER[: 20 + slot], draw)
    before = {name: array.copy() for name, array in r.backend._state[0].items()}
    r.decode(Part(1, 21, OTHER[21:23], draw), rows=8, sequences=3)
    for name, array in r.backend._state[0].items():
        assert_bits(array[[0, 2, 3]], before[name][[0, 2, 3]], name)


@every_block
def test_a_prefill_proposes_what_a_decode_step_would(block: int) -> None:
    """So that the first decode step is an ordinary one (architecture.md 3)."""
    r = rig(block)
    for length in (2, 65):
        want = r.prefill(0, IDS[:length], SAMPLED)
        q = r.drawn_from(0)
        r.prefill(1, IDS[: length - 1])
        (got,) = r.decode(Part(1, length - 1, IDS[length - 1 : length], SAMPLED))
        assert_same_result(got, want, f"{length}")
        assert_bits(r.drawn_from(1), q, f"{length} q")


# --- what steps leave ---


FIRST, LAST = 9, 108  # lengths of the plain run: rings of 64 wrap, a window has passed since


@functools.cache
def plain() -> dict[int, tuple[Behind, dict[str, Array]]]:
    """One row a step: the block of 5 behind every length, and the live state."""
    r = rig(5)
    r.prefill(1, IDS[:FIRST])
    found = {}
    for at in range(FIRST, LAST):
        (behind,) = forced(r, [Part(1, at, IDS[at : at + 1])], [0], [IDS[at + 1]])
        found[at + 1] = behind, r.live(1, at + 1)
    return found


@pytest.mark.parametrize(("block", "start"), [(5, 9), (5, 10), (6, 10), (7, 9)])
def test_rings_after_steps_of_every_length_are_those_of_a_plain_run(block: int, start: int) -> None:
    """Each acceptance length at odd and even positions and across ring wraps: all live state, and
    the block proposed from it."""
    r, at, seen = rig(block), start, set()
    r.prefill(0, IDS[:start])
    lengths = [*range(block + 1), *range(block, -1, -1), *range(0, block + 1, 2)]
    for number, accepted in enumerate(lengths * 3):
        if at + accepted + 1 > LAST:
            break
        seen.add((accepted, at % 2))
        part = Part(0, at, verified(block + 1, accepted, at, number))
        (got,) = forced(r, [part], [accepted], [IDS[at + accepted + 1]])
        at += accepted + 1
        want, live = plain()[at]  # state does not depend on the size of blocks
        if block == 5:
            assert_same_block(got, want, f"{accepted} accepted before {at}")
        assert_same_bits(r.live(0, at), live, f"{accepted} accepted before {at}")
    assert at > 64 + 32
    assert {accepted for accepted, _ in seen} == set(range(block + 1))
    assert len(seen) > block + 1, "some lengths at odd and at even positions"


# --- the chain of drafts ---


def replayed(rig: DraftRig, draw: Draw) -> tuple[Behind, Array]:
    """A step of one row behind 40 tokens; and its drafts' logits [B, V], correction included."""
    rig.prefill(0, IDS[:40])
    runner = rig.decoder(1)
    (behind,) = forced(rig, [Part(0, 40, IDS[40:41], draw)], [0], [IDS[41]])
    markov = [runner.read(f"draft.{i}.markov")[0] for i in range(len(behind.drafts))]
    return behind, runner.read("draft.logits") + np.stack(markov)


@every_block
def test_greedy_drafts_are_the_largest_corrected_logits(block: int) -> None:
    behind, logits = replayed(rig(block), Draw())
    assert list(behind.drafts) == logits.argmax(axis=1).tolist()


@every_block
@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_drafts_come_from_q_at_their_positions(block: int, seed: int) -> None:
    """The first draft stands behind the anchor, which stands at 41."""
    r, draw = rig(block), Draw(temperature=0.9, top_p=0.95, top_k=50, seed=seed, step=6)
    behind, logits = replayed(r, draw)
    q = r.drawn_from(0)
    for i, token in enumerate(behind.drafts):
        p = distribution(logits[i], float(np.float32(0.9)), float(np.float32(0.95)), 50)
        assert_bits(q[i], p.astype(np.float32), f"q {i}")
        u = uniform(
            np.array([seed], np.uint64), np.array([42 + i], np.int32), np.array([6], np.int32),
            Purpose.DRAFT,
        )[0]  # fmt: skip
        assert token == pick(q[i].astype(np.float64), float(u))


@every_block
def test_nothing_behind_a_draft_decides_about_it(block: int) -> None:
    """c_i and the logits of draft i depend on drafts before i alone: the width rule rests on it."""
    runs = [replayed(rig(block), SAMPLED._replace(seed=seed, temperature=2.0)) for seed in range(5)]
    compared = 0
    for (a, logits_a), (b, logits_b) in pairwise(runs):
        same = next((i for i in range(block) if a.drafts[i] != b.drafts[i]), block)
        for i in range(min(same + 1, block)):
            assert_bits(a.confidence[i : i + 1], b.confidence[i : i + 1], f"c_{i}")
            assert_bits(logits_a[i], logits_b[i], f"logits {i}")
            compared += 1
        for i in range(same + 1, min(same + 2, block)):
            assert a.confidence[i] != b.confidence[i]
    assert compared >= 4


@every_block
def test_verification_knows_what_the_drafts_were_drawn_from(block: int) -> None:
    """From one step to the next through the slot's q: against the rule, by hand."""
    r, counts = rig(block), set()
    for seed in range(5):
        draw = Draw(temperature=3.0, top_k=4, seed=seed)
        behind = r.prefill(2, IDS[:30], draw)
        q = r.drawn_from(2).astype(np.float64)[None]
        ids = [behind.token, *behind.drafts]
        (got,) = r.decode(Part(2, 30, ids, draw._replace(step=1)))
        p = np.stack([distribution(row, 3.0, 1.0, 4) for row in got.logits])[None]
        drafts = np.array([behind.drafts], np.int32)
        numbers = verify_draws(
            np.array([seed], np.uint64), np.array([31], np.int32), np.ones(1, np.int32), block
        )
        accepted, token = block_verify(p, q, drafts, *numbers)
        assert (got.accepted, got.token) == (accepted[0], token[0])
        counts.add(got.accepted)
    assert len(counts) > 1


# --- several ranks ---


PARTS = ("codes", "scales")


@pytest.fixture(scope="module")
def ranks() -> DraftRig:
    return DraftRig(5, world=2)


def drafted_from(rig: DraftRig, taps: Array, anchor: int) -> dict[str, Array]:
    """A block behind the given drafting inputs: what the draft stages make of equal inputs."""
    count, tap = len(taps), f"L{max(rig.model.draft_targets)}.tap"
    runner = rig.decoder(count)
    write_step(runner, [Part(0, 0, [0] * count)])
    runner.run(runner.plan.span("step"))
    runner.write(tap, taps)
    runner.run(runner.plan.span("context"))
    runner.write("io.token", np.array([anchor]))
    runner.write("io.accepted", np.array([count - 1]))
    runner.run(runner.plan.span("draft"))
    name = "draft.logits" if rig.backend.world == 1 else "draft.logits_all"
    values = {n: runner.read(n) for n in ("draft.h", "io.confidence", "io.drafts")}
    return {**values, "logits": runner.read(name)}


def rms(values: list[Array]) -> float:
    return float(np.sqrt(np.mean(np.square(np.concatenate(values), dtype=np.float64))))


def test_ranks_draft_what_one_does(ranks: DraftRig) -> None:
    """From equal taps context rows are equal to the bit. Then sums over ranks move an ulp, which
    takes blocks no farther than the other rounding of attention weights does."""
    single, rounded = rig(5), DraftRig(5)
    rounded.build = replace(rounded.build, round_attention=True)
    drift: dict[tuple[str, DraftRig], list[Array]] = {}
    for number in range(8):
        ids = np.random.default_rng(number).integers(3, 480, 21).tolist()
        runner = single.decoder(20)
        single.ran(runner, Part(0, 0, ids[:20]))
        taps = runner.read(f"L{max(single.model.draft_targets)}.tap")
        one = drafted_from(single, taps, ids[20])
        for other in (ranks, rounded):
            block = drafted_from(other, taps, ids[20])
            for rank, state in enumerate(other.backend._state):
                for name in (f"draft.stage{n}.ring_{p}" for n in range(3) for p in PARTS):
                    want = single.backend._state[0][name][0, :20]
                    assert_bits(state[name][0, :20], want, f"{name} of rank {rank}")
            for name, value in block.items():
                drift.setdefault((name, other), []).append(value - one[name])
    for name in ("draft.h", "logits", "io.confidence"):
        assert 0 < rms(drift[name, ranks]) <= 1.25 * rms(drift[name, rounded]), name
    moved = np.concatenate(drift["io.drafts", ranks]) != 0
    assert moved.mean() <= 0.1, "drafts themselves"


def test_ranks_hold_the_same_drafts(ranks: DraftRig) -> None:
    ranks.prefill(0, IDS[:40], SAMPLED)
    ranks.decode(Part(0, 40, IDS[40:44], SAMPLED))
    runner = ranks.decoder(4)
    names = ("io.token", "io.accepted", "io.drafts", "io.confidence", "draft.h", "draft.logits_all")
    for name in names:
        assert_bits(runner.read(name, 1), runner.read(name, 0), name)
    for name, array in ranks.state().items():
        assert_bits(ranks.state(1)[name], array, name)
    q = [state["draft.q"] for state in ranks.backend._state]
    assert_bits(q[1], q[0], "q")


def test_rows_and_rejections_do_not_matter_to_ranks_either(ranks: DraftRig) -> None:
    ranks.prefill(0, IDS[:40])
    (want,) = forced(ranks, [Part(0, 40, verified(3, 2, 40))], [2], [IDS[43]])
    live = ranks.live(0, 43)
    ranks.prefill(0, IDS[:40])
    (got,) = forced(ranks, [Part(0, 40, verified(6, 2, 40))], [2], [IDS[43]])
    assert_same_block(got, want, "6 rows")
    assert_same_bits(ranks.live(0, 43), live, "6 rows")
