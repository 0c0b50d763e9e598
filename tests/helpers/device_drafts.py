"""Drafts that are right up to a chosen depth, put where a step leaves its own.

As `ForcedDrafts`, but in state and record alike, so that the device goes on with them: its next
step may be queued before anybody reads what this one said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ultraflash.runtime.interpret import NumpyRunner


def force_drafts(patch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]], vocab: int) -> None:
    """Every step of the interpreter proposes what these sequences go on with, prompts and greedy
    answers, with an error somewhere that follows from the position; confidences are all the same.
    """
    run = NumpyRunner.run

    def forced(runner: NumpyRunner, span: slice | None = None) -> None:
        run(runner, span)
        if "next.confidence" not in runner.plan.buffers:
            return
        ids, at = runner.read("next.ids"), runner.read("next.at")
        drafts, confidence = runner.read("io.drafts"), runner.read("io.confidence")
        row_start, slots = runner.read("io.row_start"), runner.read("io.slot")
        for s in range(len(drafts)):
            slot = int(slots[row_start[s]])
            known = _behind(texts, int(at[slot, 0]), int(ids[slot, 0]), drafts.shape[1])
            wrong = int(np.random.default_rng(at[slot, 0]).integers(drafts.shape[1] + 1))
            if wrong < len(known):
                known[wrong] = (known[wrong] + 1) % vocab
            drafts[s, : len(known)], confidence[s] = known, 2.0
            ids[slot, 1:], runner.read("next.confidence")[slot] = drafts[s], confidence[s]

    patch.setattr(NumpyRunner, "run", forced)


def _behind(texts: Sequence[Sequence[int]], at: int, token: int, count: int) -> list[int]:
    """What comes behind a token at a position, nothing if no text has it there."""
    text = next((t for t in texts if len(t) > at and t[at] == token), ())
    return np.array(text[at + 1 : at + 1 + count], np.int64).tolist()
