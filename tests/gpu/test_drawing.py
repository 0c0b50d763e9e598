"""Tokens drawn from the released vocabulary, whose rows a cluster of CTAs shares: every mixture of
sampling parameters, biases, masks and bans against the reference, the same bits again and again and
whoever stands beside. A vocabulary may end inside a vector, or leave CTAs without ids.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.compare import assert_same_bits
from helpers.device import sized
from helpers.device_cases import Case
from helpers.device_checks import check
from helpers.device_inputs import Inputs, make_inputs
from helpers.device_ops import Ops, Outputs, Sample, reference
from helpers.device_speculation import accept_op, draft_op
from helpers.device_weights import Shelf
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.ops.draft_sample import DraftSample
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.release import release_model

pytestmark = pytest.mark.gpu

RELEASED = release_model().vocab
VOCABS = (RELEASED, RELEASED - 1, 5000)
SEQUENCES, SLOTS, BLOCK, ROWS = 3, 4, 5, 16
TRIALS, REPEATS = sized(10, 1), sized(50, 1)
OF_ROWS = ("ids", "slot", "position", "logits", "mask", "banned")  # of `accept`
Array = npt.NDArray[Any]


@pytest.mark.parametrize("vocab", VOCABS)
def test_verification(ops: Ops, vocab: int) -> None:
    op = accept_op(ROWS, SEQUENCES, SLOTS, BLOCK, vocab)
    kept = 0
    for trial in range(TRIALS):
        made = make(op, f"accept {vocab}", trial)
        got = checked(ops, op, made)
        kept += int(got["accepted"].sum())
        for s in range(SEQUENCES):
            compare_accepted(ops, op, made, got, s)
    assert kept, "no draft ever stays"


@pytest.mark.parametrize("vocab", VOCABS)
def test_proposals(ops: Ops, vocab: int) -> None:
    op = draft_op(SEQUENCES, SLOTS, BLOCK, vocab, index=2)
    for trial in range(TRIALS):
        made = make(op, f"draft {vocab}", trial)
        got = checked(ops, op, made)
        for s in range(SEQUENCES):
            compare_drafted(ops, made, got, s, vocab)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("top_k", [0, 40, RELEASED - 1])
@pytest.mark.parametrize("temperature", [0.8, 1e-30, 30.0])
def test_extreme_settings(ops: Ops, temperature: float, top_k: int, top_p: float) -> None:
    """Of rows that are all different, and of rows with equal logits in every warp."""
    op = draft_op(SEQUENCES, SLOTS, BLOCK, RELEASED, index=2)
    made = make(op, "extreme", 0)
    made["temperature"][:], made["top_k"][:], made["top_p"][:] = temperature, top_k, top_p
    checked(ops, op, made)
    made["markov"][:] = 0
    made["logits"] = np.round(made["logits"])
    made["logits"][BLOCK + 2] = 1.5  # of sequence 1: all equal
    checked(ops, op, made)


def make(op: Accept | DraftSample, name: str, trial: int) -> Inputs:
    """Odd trials have idle rows."""
    rng = Case(name, op).rng(trial)
    return make_inputs(op, rng, Shelf(), early=trial % 2 == 1)


def checked(ops: Ops, op: Accept | DraftSample, made: Inputs) -> Outputs:
    """What the operation wrote, as the reference does and the same every time."""
    held = ops.hold(op, made)
    got = held.run(made)
    check(op, made, Sample(), got, reference(op, made, Sample()))
    for _ in range(REPEATS):
        again = held.run(made)
        for name, array in got.items():
            assert_same_bits(again[name], array)
    return got


def compare_accepted(ops: Ops, op: Accept, made: Inputs, got: Outputs, s: int) -> None:
    """Sequence s by itself."""
    first, end = made["row_start"][s : s + 2].tolist()
    if first == end:
        assert got["accepted"][s] == got["token"][s] == 0
        return
    alone = accept_op(end - first, 1, SLOTS, BLOCK, op.logits.shape[1])
    own = {name: made[name][first:end] for name in OF_ROWS}
    own |= {"row_start": np.array([0, end - first], np.int32), "q": made["q"]}
    out = ops.run(alone, own | rest_of(alone, made, own, s))
    for name in ("accepted", "token"):
        assert_same_bits(out[name], got[name][s : s + 1])
    for name in ("logprob", "top_ids", "top_logprobs"):
        assert_same_bits(out[name], got[name][first:end])


def compare_drafted(ops: Ops, made: Inputs, got: Outputs, s: int, vocab: int) -> None:
    """Sequence s by itself, of one index for all."""
    alone = draft_op(1, SLOTS, BLOCK, vocab, index=2)
    rows = slice(s * BLOCK, (s + 1) * BLOCK)
    own = {name: made[name][rows] for name in ("logits", "at", "slot")} | {"q": made["q"]}
    out = ops.run(alone, own | rest_of(alone, made, own, s))
    assert_same_bits(out["drafts"], got["drafts"][s : s + 1])
    slot = made["slot"][s * BLOCK + 2]
    if slot >= 0:
        assert_same_bits(out["q"][slot], got["q"][slot])


def rest_of(op: Accept | DraftSample, made: Inputs, own: Inputs, s: int) -> dict[str, Array]:
    """Fields that have an entry for each sequence."""
    names = [f.name for f in fields(op) if isinstance(getattr(op, f.name), Ref)]
    wanted = [name for name in names if name not in own and name not in op.OUT]
    return {name: made[name][s : s + 1] for name in wanted}
