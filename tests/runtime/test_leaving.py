"""Points that take a while to reach the store: nobody waits for them but who needs them.

The interpreter copies at once; here its copies arrive when the test says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from helpers.desk import some_ids
from helpers.points import ASSISTANT, EOS, USER
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling
from ultraflash.runtime.backend import Bytes, Rows, Staged
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.store import LocalStore

EVERY, THINK_END = 32, 494
PROMPT = [0, USER, *some_ids(1, 60), ASSISTANT, THINK_END]


class Late:
    """Implements `Staged`: there when the gate is open, or when somebody insists."""

    def __init__(self, data: Bytes, gate: Gate) -> None:
        self._data, self._gate = data, gate

    def wait(self, seconds: float | None = None) -> bool:
        if not self._gate.open and seconds:
            time.sleep(seconds)
        return self._gate.open

    def take(self) -> Bytes:
        if self._gate.broken:
            raise DeviceError("a copy failed")
        self._gate.insisted += not self._gate.open
        return self._data


class Gate:
    """A backend whose copies wait."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.open, self.broken, self.insisted = False, False, 0
        self.staged: list[Sequence[Rows]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def stage(self, slot: int, parts: Sequence[tuple[bytes, Sequence[Rows]]]) -> list[Staged]:
        self.staged += [rows for _, rows in parts]
        return [Late(staged.take(), self) for staged in self._backend.stage(slot, parts)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    config = RuntimeConfig(backend="numpy", cache_dir=tmp_path_factory.mktemp("cache"))
    small = {"max_seq": 512, "max_sequences": 2, "segment_tokens": EVERY, "width": "all"}
    return Engine.open(replace(config, **small))  # type: ignore[arg-type]


@pytest.fixture
def engine(opened: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(opened, "_backend", Gate(opened._backend))
    opened.use_store(LocalStore(1 << 26))
    yield opened
    opened.close()


def gate(engine: Engine) -> Gate:
    found: Any = engine._backend
    assert isinstance(found, Gate)
    return found


def answer(engine: Engine, ids: Sequence[int], tokens: int = 6) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's came from the store."""
    engine.submit("k", Generation(tuple(ids), tokens, Sampling(0.0), ignore_eos=True))
    found: list[int] = []
    cached = 0
    while engine._queue or engine._live():
        for step in engine.step():
            found += step.tokens
            cached = step.cached_tokens
    return found, cached


def points(engine: Engine) -> int:
    assert engine.store is not None
    return engine.store.stats().points


def test_nobody_waits_and_nothing_is_lost(engine: Engine) -> None:
    started = time.perf_counter()
    answer(engine, PROMPT)
    assert points(engine) == 0, "handed over before it had arrived"
    assert gate(engine).insisted == 0
    assert engine.has_work, "points are still to be handed over"
    assert time.perf_counter() - started < 5, "the end of an answer waits for milliseconds"
    engine.step()
    assert points(engine) == 0
    gate(engine).open = True
    assert engine.step() == []
    assert points(engine) == 4  # two regular ones, the header, the end of the answer
    assert not engine.has_work


def test_who_needs_a_point_waits_for_it(engine: Engine) -> None:
    tokens, _ = answer(engine, PROMPT)
    follow = [*PROMPT, *tokens[:-1], EOS, USER, 9, ASSISTANT, THINK_END]
    again, cached = answer(engine, follow)
    assert cached == len(PROMPT) + len(tokens) - 1
    assert gate(engine).insisted > 0
    engine.use_store(None)
    assert answer(engine, follow) == (again, 0)


def test_who_needs_another_one_does_not_wait(engine: Engine) -> None:
    answer(engine, PROMPT)
    assert answer(engine, some_ids(2, 50))[1] == 0
    assert gate(engine).insisted == 0
    assert points(engine) == 0


def test_a_segment_leaves_once(engine: Engine) -> None:
    """Points of one conversation share segments that have not arrived yet."""
    answer(engine, PROMPT)
    entries = [ref.name for ref, _ in engine._layout.entries]
    spans = [rows[-1][1:] for rows in gate(engine).staged if rows[0].name == entries[0]]
    assert spans == sorted(set(spans))
    gate(engine).open = True
    engine.step()
    store = engine.store
    assert isinstance(store, LocalStore)
    held = sorted((i.start, i.end) for i in store._segments)
    assert held == [(0, 32), (32, 62), (32, 64), (64, 69)]


def test_a_store_that_forgot_meanwhile_refuses(engine: Engine) -> None:
    """A segment was there when it was asked for and is gone when its point arrives."""
    store = engine.store
    assert isinstance(store, LocalStore)
    gate(engine).open = True
    tokens, _ = answer(engine, PROMPT)
    gate(engine).open = False
    follow = [*PROMPT, *tokens[:-1], EOS, USER, 9, ASSISTANT, THINK_END]
    want = answer(engine, follow)
    for key in list(store._entries):
        store._drop(key)
    before = store.stats().refused
    gate(engine).open = True
    engine.step()
    assert store.stats().refused > before
    # What was forgotten leaves the device once more with the next point.
    assert answer(engine, follow)[0] == want[0]
    assert answer(engine, follow) == (want[0], len(follow) - 2)


def test_a_copy_that_failed_ends_the_step(engine: Engine) -> None:
    answer(engine, PROMPT)
    gate(engine).broken = gate(engine).open = True
    with pytest.raises(DeviceError, match="a copy failed"):
        engine.step()
    gate(engine).broken = False


def test_missing_is_asked_before_the_bytes_leave(engine: Engine) -> None:
    """What the store has does not travel."""
    gate(engine).open = True
    answer(engine, PROMPT)
    count, entries = len(gate(engine).staged), len(engine._layout.entries)
    answer(engine, PROMPT)  # the same answer again
    assert len(gate(engine).staged) > count, "the point at its end"
    assert [rows for rows in gate(engine).staged[count:] if len(rows) == entries] == []
