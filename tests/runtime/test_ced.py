"""An engine that prefills without the decoder: its answers, whatever the chunks and the company.

Up to the tail they are those of the full prefill; above, those of the full plan with the decoder's
windows cut at the tail (helpers/ced.py), continued one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.ced import TAIL, masked
from helpers.drafting import DraftRig
from helpers.engines import alone, assert_no_slot_is_lost, drain, greedy, open_engine, run, seeded
from ultraflash.runtime import ConfigError, Engine, Generation
from ultraflash.runtime.step_io import Part

MODES = ("ced20", "ced21")
MORE = 6
# `all` knows no clock: the same drafts are verified each time.
SETTINGS: dict[str, object] = {
    "width": "all",
    "max_rows": 3,
    "tail": TAIL,
    "store_bytes": 0,
    "max_seq": 200,
}


@pytest.fixture(scope="module")
def full(engine_cache: Path) -> Engine:
    return open_engine(engine_cache, **SETTINGS)


@pytest.fixture(scope="module")
def rig() -> DraftRig:
    return DraftRig(slots=1)


@pytest.fixture(scope="module", params=MODES)
def opened(request: pytest.FixtureRequest, engine_cache: Path) -> Engine:
    return open_engine(engine_cache, prefill=request.param, **SETTINGS)


@pytest.fixture
def ced(opened: Engine) -> Iterator[Engine]:
    assert not opened.has_work
    yield opened
    opened.close()
    assert_no_slot_is_lost(opened)


def mode(engine: Engine) -> str:
    return engine._config.prefill


def expected(rig: DraftRig, engine: Engine, request: Generation) -> list[int]:
    """The greedy answer to a prompt above the tail; EOS is not allowed."""
    ids, eos = list(request.ids), engine.model.eos
    logits = masked(rig, 0, ids, mode(engine)).logits[0]
    logits[eos] = -np.inf
    tokens = [int(logits.argmax())]
    while len(tokens) < request.max_tokens:
        part = Part(0, len(ids), tokens[-1:], banned=eos, ban_end=len(ids) + 1)
        ids.append(tokens[-1])
        tokens.append(rig.decode(part)[0].token)
    return tokens


@pytest.mark.parametrize("make", [greedy, seeded], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, TAIL])
def test_up_to_the_tail_answers_are_those_of_the_full_prefill(
    ced: Engine, full: Engine, make: Callable[..., Generation], length: int
) -> None:
    request = make(length, length, MORE, ignore_eos=True)
    assert alone(ced, request) == alone(full, request)


@pytest.mark.parametrize("length", [TAIL + 1])
def test_above_the_tail_answers_are_those_of_the_masked_prefill(
    ced: Engine, rig: DraftRig, length: int
) -> None:
    request = greedy(length, length, MORE, ignore_eos=True)
    assert alone(ced, request) == (expected(rig, ced, request), "length")


def proposed(engine: Engine, request: Generation) -> tuple[list[int], list[float]]:
    """Drafts and confidences behind the prompt."""
    engine.submit("a", request)
    while not engine.step():
        pass
    (session,) = engine._live()
    found = list(session.drafts), list(session.confidence)
    engine.cancel("a")
    return found


@pytest.mark.parametrize("length", [62, 97])
def test_above_the_tail_proposals_are_those_of_the_masked_prefill(
    ced: Engine, full: Engine, rig: DraftRig, length: int
) -> None:
    """To the last bit of a confidence, by which the full prefill can be told apart."""
    request = greedy(length, length, 2, ignore_eos=True)
    want = masked(rig, 0, list(request.ids), mode(ced))
    got = proposed(ced, request)
    assert got == (list(want.drafts), want.confidence.tolist())
    assert got != proposed(full, request)


def test_chunks_of_a_prompt_change_nothing(ced: Engine, engine_cache: Path) -> None:
    requests = [greedy(1, 61, 2), seeded(2, 45, 3)]
    want = [alone(ced, request) for request in requests]
    for chunks in ((5,), (64,)):
        other = open_engine(engine_cache, prefill=mode(ced), prefill_chunks=chunks, **SETTINGS)
        assert [alone(other, request) for request in requests] == want, chunks


def test_company_changes_nothing(ced: Engine) -> None:
    """Others encode, replay and decode in between, in slots that were used before."""
    lengths = (70, 3, 33, 45)
    requests = {
        f"r{n}": (seeded if n % 2 else greedy)(n, length, 3 + n) for n, length in enumerate(lengths)
    }
    want = {key: alone(ced, request) for key, request in requests.items()}
    assert run(ced, **requests) == want


def test_a_prompt_is_encoded_chunk_by_chunk_and_replayed_once(ced: Engine) -> None:
    """37 = 16 + 16 + 5, then the replay, which gives the first token."""
    ced.submit("a", greedy(2, 37, 3, ignore_eos=True))
    assert [ced.step() for _ in range(3)] == [[], [], []]
    (first,) = ced.step()
    assert (len(first.tokens), first.prompt_tokens, first.cached_tokens) == (1, 37, 0)
    assert first.prefill_ms > 0
    drain(ced)


def test_others_decode_while_a_prompt_is_encoded(ced: Engine) -> None:
    """One chunk a step, whatever the mode."""
    ced.submit("a", greedy(1, 3, 60, ignore_eos=True))
    while not ced.step():
        pass
    ced.submit("b", greedy(2, 60, 2, ignore_eos=True))
    keys = [[step.key for step in ced.step()] for _ in range(5)]  # 16 + 16 + 16 + 12, replay
    assert keys == [["a"], ["a"], ["a"], ["a"], ["a", "b"]]
    ced.cancel("a")
    drain(ced)


def test_cancel_before_the_replay(ced: Engine) -> None:
    """Whatever stands in the slot's rings, the next prompt does not see it."""
    request = greedy(3, 50, 6, ignore_eos=True)
    want = alone(ced, request)
    for steps in (1, 4, 4):
        ced.submit("gone", greedy(4, 60, ignore_eos=True))
        for _ in range(steps):
            ced.step()
        ced.cancel("gone")
        assert_no_slot_is_lost(ced)
    assert alone(ced, request) == want


@pytest.mark.parametrize("tail", [1, 15])
@pytest.mark.parametrize("which", MODES)
def test_a_tail_shorter_than_the_window_is_refused(
    engine_cache: Path, which: str, tail: int
) -> None:
    with pytest.raises(ConfigError, match=f"tail {tail} is shorter than the window of 16"):
        open_engine(engine_cache, **{**SETTINGS, "prefill": which, "tail": tail})


def test_a_tail_of_just_the_window_works(engine_cache: Path) -> None:
    for which in MODES:
        engine = open_engine(engine_cache, **{**SETTINGS, "prefill": which, "tail": 16})
        assert len(alone(engine, greedy(1, 50, 4, ignore_eos=True))[0]) == 4


def test_min_tokens_hold_behind_a_replay(ced: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token comes from the replay: the ban has to reach its last row."""
    request = greedy(5, 61, 6)
    free, _ = alone(ced, replace(request, ignore_eos=True))
    monkeypatch.setattr(ced, "model", replace(ced.model, eos=free[0]))
    assert alone(ced, request) == ([], "stop")
    held, _ = alone(ced, replace(request, min_tokens=3))
    assert len(held) >= 3
    assert free[0] not in held
