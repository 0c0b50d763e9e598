"""Greedy speculative decoding on the device gives plain decoding's tokens, over 50,000 of them.

Proposals are forced (helpers/forced.py), so that every acceptance length occurs; the draft stages'
own too. Conversations leave and come back; CED replays equal full prefill up to the tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.device import BACKEND, count, report, sized
from helpers.device_rig import TINY
from helpers.forced import ForcedDrafts, Text
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling
from ultraflash.runtime.probe import Probe
from ultraflash.runtime.resume import Kind

pytestmark = pytest.mark.gpu

TOKENS = count("UF_GPU_TOKENS", 2170, 60)  # of an answer; prompt and answer fit into MAX_SEQ
WANTED, EACH = sized(50_000, 500), sized(500, 20)
MAX_SEQ, BLOCK = 2304, 7
PROMPTS = (9, 41, 130)  # below the window, above it, above what the candidate pool holds
LENGTHS: Counter[int] = Counter()  # acceptance length -> steps
EMITTED: Counter[str] = Counter()  # tokens that were compared
ENGINES: dict[tuple[Any, ...], Engine] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def open_engine(folder: Path, rows: int, block: int, sequences: int = 1, **more: Any) -> Engine:
    """Engines are kept: each compiles and captures its plans once."""
    key = (rows, block, sequences, *sorted(more.items()))
    if key not in ENGINES:
        settings = {"max_seq": MAX_SEQ, "store_bytes": 0, "width": "all", **more}
        # Kernels come from the common cache.
        config = RuntimeConfig.from_env(
            backend=BACKEND, max_rows=rows, draft_block=block, max_sequences=sequences, **settings
        )
        ENGINES[key] = Engine.open(config)
    return ENGINES[key]


def prompt(length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(length).integers(3, 480, length))


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    drafts: list[tuple[int, ...]] = field(default_factory=list)  # all proposals, in order
    cached: int = 0


def ask(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, **how: Any) -> list[Answer]:
    """The answers of requests that run side by side."""
    answers = {str(n): Answer() for n in range(len(prompts))}
    sampling = how.pop("sampling", Sampling(0.0))
    for key, ids in zip(answers, prompts, strict=True):
        engine.submit(key, Generation(tuple(ids), tokens, sampling, ignore_eos=True, **how))
    while engine.has_work:
        steps = engine.step()
        proposals = {s.key: tuple(s.drafts) for s in engine._live() if s.answering}
        for step in steps:
            answer = answers[step.key]
            answer.tokens += step.tokens
            answer.cached = step.cached_tokens
            if step.key in proposals:
                answer.drafts.append(proposals[step.key])
    return list(answers.values())


@cache
def plain(length: int, folder: Path) -> tuple[int, ...]:
    """The answer without any drafting."""
    return tuple(ask(open_engine(folder, 1, 0), [prompt(length)], TOKENS)[0].tokens)


def forced(folder: Path, rows: int, lengths: Sequence[int]) -> None:
    engine = open_engine(folder, rows, BLOCK, len(lengths))
    texts = [Text(prompt(n) + plain(n, folder), n) for n in lengths]
    own = engine._plans
    engine._plans = ForcedDrafts(own, texts, BLOCK, engine.model.vocab, LENGTHS)
    try:
        answers = ask(engine, [prompt(n) for n in lengths], TOKENS)
    finally:
        engine._plans = own
    for length, answer in zip(lengths, answers, strict=True):
        assert tuple(answer.tokens) == plain(length, folder), f"{rows} rows, prompt {length}"
        EMITTED["forced"] += len(answer.tokens)


@pytest.mark.parametrize("rows", range(2, 9))
def test_one_sequence(rows: int, folder: Path) -> None:
    forced(folder, rows, [PROMPTS[rows % len(PROMPTS)]])


@pytest.mark.parametrize("rows", range(3, 9))
def test_two_sequences(rows: int, folder: Path) -> None:
    forced(folder, rows, [n for n in PROMPTS if n != PROMPTS[rows % len(PROMPTS)]])


@pytest.mark.parametrize("rows", range(4, 9))
def test_three_sequences(rows: int, folder: Path) -> None:
    forced(folder, rows, PROMPTS)


def test_every_acceptance_length_occurred(folder: Path) -> None:
    # Also when this test runs alone, or the others ran in another process.
    for _ in range(200):
        if min(LENGTHS[n] for n in range(BLOCK + 1)) >= EACH and EMITTED["forced"] >= WANTED:
            break
        forced(folder, BLOCK + 1, [PROMPTS[1]])
    table = " ".join(f"{n}:{LENGTHS[n]}" for n in range(BLOCK + 1))
    report(f"speculative = plain over {EMITTED['forced']} tokens; accepted by length {table}")
    assert EMITTED["forced"] >= WANTED
    assert all(LENGTHS[n] >= EACH for n in range(BLOCK + 1)), table


@pytest.mark.parametrize("block", [5, 6, 7])
def test_own_proposals(block: int, folder: Path) -> None:
    """Nothing forced: what the draft stages really propose, each block size."""
    wanted = sized(600, 20)
    engine = open_engine(folder, block + 1, block)
    (answer,) = ask(engine, [prompt(PROMPTS[1])], min(wanted, TOKENS))
    assert tuple(answer.tokens) == plain(PROMPTS[1], folder)[: len(answer.tokens)]
    assert len(answer.tokens) == min(wanted, TOKENS)


def test_a_seeded_request_repeats(folder: Path) -> None:
    """Sampled, seeded: the same tokens and proposals again, beside others and not."""
    engine = open_engine(folder, 8, BLOCK, 3)
    how = {"sampling": Sampling(1.2, top_p=0.95, top_k=60, seed=11)}
    many = sized(200, 12)
    (one,) = ask(engine, [prompt(41)], many, **how)
    (two,) = ask(engine, [prompt(41)], many, **how)
    assert one == two
    assert len(set(one.tokens)) > 3, "sampled at all"
    three = ask(engine, [prompt(9), prompt(41), prompt(130)], many, **how)[1]
    assert one.tokens[0] == three.tokens[0]


# --- leaving and coming back ---


def test_a_snapshot_goes_on_in_another_slot() -> None:
    """State as bytes, put back elsewhere: the same logits, state and drafts to the bit."""
    probe = Probe.open(TINY, backend=BACKEND, max_seq=256)
    ids = [int(i) for i in np.random.default_rng(5).integers(3, 480, 160)]
    for length in (1, 15, 16, 17, 64, 67, 101):
        state, _ = probe.prefill(ids[:length])
        kept = probe.snapshot(state)
        back = probe.restore(kept)
        assert back.slot != state.slot
        assert probe.snapshot(back) == kept, f"{length} tokens"
        for size in (1, 4, 8):
            want = probe.extend(state, ids[state.length : state.length + size])
            got = probe.extend(back, ids[back.length : back.length + size])
            assert got.tobytes() == want.tobytes(), f"{size} rows behind {length} tokens"
        assert probe.snapshot(back) == probe.snapshot(state), f"behind {length} tokens"


def test_a_conversation_comes_back(folder: Path) -> None:
    """A second turn from the store answers as one without, and most of it was not computed."""
    more = {"segment_tokens": 32}
    without = open_engine(folder, 8, 5, 2, **more)
    engine = open_engine(folder, 8, 5, 2, store_bytes=1 << 26, **more)
    assistant, user = 491, 490
    turn = [0, user, *prompt(70), assistant]
    (first,) = ask(engine, [turn], 20)
    again = [*turn, *first.tokens, user, *prompt(9), assistant]
    (want,) = ask(without, [again], sized(60, 8))
    (got,) = ask(engine, [again], sized(60, 8))
    assert (got.tokens, got.drafts) == (want.tokens, want.drafts)
    assert want.cached == 0
    assert got.cached >= len(turn) - 1


# --- prompts that skip the decoder ---

TAIL = 24


@pytest.mark.parametrize("mode", ["ced20", "ced21"])
def test_a_replay_of_the_whole_prompt_is_full_prefill(mode: str, folder: Path) -> None:
    """Answers, proposals and the state behind the prompt, for prompts up to the tail."""
    full = open_engine(folder, 6, 5)
    ced = open_engine(folder, 6, 5, prefill=mode, tail=TAIL)
    for length in (1, 2, 7, 15, 16, 17, 23, 24):
        answers, points = [], []
        for engine in (full, ced):
            answers += ask(engine, [prompt(length)], 1)
            slot = engine._free[-1]  # given back last
            layout, backend = full._layout, engine._backend
            points.append(layout.export_point(backend, slot, length, Kind.FULL))
            points.append(layout.export_segment(backend, slot, 0, length))
            answers += ask(engine, [prompt(length)], sized(40, 6))
        assert answers[:2] == answers[2:], f"prompt of {length}"
        assert points[:2] == points[2:], f"state behind {length}"


@pytest.mark.parametrize("mode", ["ced20", "ced21"])
def test_longer_prompts_replay_their_tail(mode: str, folder: Path) -> None:
    """Beyond the tail it is another text, but the same every time and in any slot."""
    engine = open_engine(folder, 6, 5, prefill=mode, tail=TAIL)
    for length in (25, 61, 130):
        one, two = (ask(engine, [prompt(length)], 20)[0] for _ in range(2))
        assert one == two
