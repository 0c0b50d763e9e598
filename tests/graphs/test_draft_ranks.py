"""The draft plan on several ranks: what they draft together, and that all hold the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.drafting import (
    IDS,
    SAMPLED,
    DraftRig,
    assert_same_block,
    forced,
    rig,
    verified,
)
from helpers.rig import assert_bits, assert_same_bits
from ultraflash.runtime.backend import Array
from ultraflash.runtime.step_io import Part, write_step

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
