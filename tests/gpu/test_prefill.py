"""Whole chunks of prompts: their length changes no bit of what a prompt leaves behind.

A prompt goes through the engine's own plans in chunks of 16 rows, then of more; the last chunk is
never full. Compared is every byte of state that a next step depends on, and what is drawn. In ced20
and ced21 the decoder sees the prompt's tail alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.device import BACKEND, sized
from helpers.device_rig import TINY, DeviceRig, State, assert_same_state
from ultraflash.graphs.ced import replay_start
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.plans import Plans, Result
from ultraflash.runtime.step_io import Draw, Part

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200)]

SLOT, TAIL = 1, 136
LENGTH = sized(4_411, 411)  # odd, more than any chunk, behind where selections are full
CHUNKS = sized((128, 1024, 4096), (128, 300))
DRAW = Draw(0.9, 0.95, 40, seed=3, want_logprobs=True)
IDS = np.random.default_rng(11).integers(3, 480, LENGTH).tolist()


@pytest.fixture(scope="module")
def rig() -> DeviceRig:
    return DeviceRig(kept=False, slots=2, max_seq=8192, block=5)


def prompted(rig: DeviceRig, mode: str, chunk: int) -> tuple[State, Result]:
    """What a prompt in chunks leaves of a slot that was empty, and what comes behind it."""
    config = RuntimeConfig.from_env(checkpoint=TINY, backend=BACKEND)
    config = replace(config, prefill=mode, tail=TAIL, prefill_chunks=(chunk,))
    plans = Plans(rig.build, rig.backend, config)
    rig.backend.clear_slot(SLOT)
    result = None
    for start in range(0, LENGTH, chunk):
        part = Part(SLOT, start, IDS[start : start + chunk], DRAW)
        if mode == "full":
            result = plans.prefill(part, ends=start + chunk >= LENGTH)
        else:
            plans.encode(part)
    if mode != "full":
        result = plans.replay(Part(SLOT, LENGTH - TAIL, IDS[-TAIL:], DRAW))
    assert result
    return rig.live(SLOT, LENGTH, drawn=True), result


@pytest.mark.parametrize("mode", ["full", "ced20", "ced21"])
def test_the_length_of_chunks_changes_nothing(rig: DeviceRig, mode: str) -> None:
    assert mode == "full" or replay_start(rig.model, mode) > 0
    state, said = prompted(rig, mode, 16)
    assert len(set(said.drafts)) > 1
    for chunk in CHUNKS:
        got, also = prompted(rig, mode, chunk)
        assert also == said, f"{mode}, chunks of {chunk}"
        assert_same_state(got, state, f"{mode}, chunks of {chunk}")


def test_chunks_are_what_single_rows_are(rig: DeviceRig) -> None:
    """A prompt in decode steps of a row each, whose tokens nobody asked for."""
    length = sized(300, 60)
    config = RuntimeConfig.from_env(checkpoint=TINY, backend=BACKEND)
    plans = Plans(rig.build, rig.backend, replace(config, prefill_chunks=(512,)))
    states: list[State] = []
    for chunked in (True, False):
        rig.backend.clear_slot(SLOT)
        if chunked:
            plans.prefill(Part(SLOT, 0, IDS[:length], DRAW), ends=True)
        else:
            for at in range(length):
                plans.decode([Part(SLOT, at, IDS[at : at + 1], DRAW)])
        states.append(rig.live(SLOT, length))
    assert_same_state(states[0], states[1], "rows one by one")
