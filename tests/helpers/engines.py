"""Requests for an engine on tiny-a, and what it answers to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from helpers.rig import TINY
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling, Step

GREEDY = Sampling(temperature=0)
MAX_SEQ, SEQUENCES = 96, 2
Answer = tuple[list[int], str | None]  # tokens, and why they end


def open_engine(folder: Path, **settings: object) -> Engine:
    config = RuntimeConfig(
        TINY, max_sequences=SEQUENCES, max_seq=MAX_SEQ, prefill_chunks=(4, 16), cache_dir=folder
    )
    return Engine.open(replace(config, **settings))  # type: ignore[arg-type]


def ahead(engine: Engine) -> Engine:
    """The engine as on a GPU: steps may be queued behind one that is under way."""
    engine._backend.places = 2  # type: ignore[misc]
    return engine


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(number).integers(3, 480, length).tolist())


def greedy(number: int, length: int, max_tokens: int = 8, **more: object) -> Generation:
    return Generation(prompt(number, length), max_tokens, GREEDY, **more)  # type: ignore[arg-type]


def seeded(number: int, length: int, max_tokens: int = 8, **more: object) -> Generation:
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=number)
    return Generation(prompt(number, length), max_tokens, sampling, **more)  # type: ignore[arg-type]


def drain(engine: Engine) -> list[Step]:
    """Run until nothing is left to do."""
    steps: list[Step] = []
    for _ in range(2000):
        if not engine.has_work:
            return steps
        steps += engine.step()
    raise AssertionError("the engine does not come to an end")


def run(engine: Engine, **requests: Generation) -> dict[str, Answer]:
    """Submit all at once; tokens and the reason to finish, by key."""
    for key, request in requests.items():
        engine.submit(key, request)
    return collected(drain(engine))


def collected(steps: list[Step]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for step in steps:
        tokens, finish = found.setdefault(step.key, ([], None))
        assert finish is None, f"{step.key} goes on after it finished"
        found[step.key] = ([*tokens, *step.tokens], step.finish)
    return found


def alone(engine: Engine, request: Generation) -> Answer:
    return run(engine, alone=request)["alone"]


def assert_no_slot_is_lost(engine: Engine) -> None:
    # No door of the engine tells slots, and a lost one only shows when all are needed.
    held = [session.slot for session in engine._live()]
    assert sorted(chain(engine._free, held)) == list(range(SEQUENCES + 1))


def different_tokens(engine: Engine, count: int) -> tuple[Generation, list[int]]:
    """A greedy request whose first `count` tokens are all different, and these."""
    for number in range(50):
        request = greedy(number, 12, count, ignore_eos=True)
        tokens, _ = alone(engine, request)
        if len(set(tokens)) == count:
            return request, tokens
    raise AssertionError("no such prompt among fifty")
