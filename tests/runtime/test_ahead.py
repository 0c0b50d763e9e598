"""Steps that follow from the last one: what the host writes for them, and what becomes of those
that were launched before anybody asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import Answer, alone, collected, drain, greedy, open_engine, run, seeded
from ultraflash.runtime import Engine, step_io
from ultraflash.runtime.plans import Plans

PLAIN: list[Engine] = []
ASKS = {"one": greedy(1, 20, 12, ignore_eos=True), "two": seeded(2, 9, 15, ignore_eos=True)}


@pytest.fixture
def plain(engine_cache: Path) -> Iterator[Engine]:
    """An engine without drafting: it knows what its next step will be."""
    if not PLAIN:
        PLAIN.append(open_engine(engine_cache, draft_block=0, store_bytes=0))
    yield PLAIN[0]
    PLAIN[0].close()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the first part of every step that the host wrote."""
    seen: list[int] = []

    def counted(runner: Any, parts: Any, follows: Any = ()) -> None:
        seen.append(len(parts[0].ids))
        write(runner, parts, follows)

    write = step_io.write_step
    monkeypatch.setattr(step_io, "write_step", counted)
    return seen


def never_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Each answer of an engine that is told everything and launches when it is asked."""
    with monkeypatch.context() as patch:
        patch.setattr(Plans, "_follows", lambda self, part: False)
        patch.setattr(engine, "_again", lambda sessions: None)
        return {key: alone(engine, ask) for key, ask in ASKS.items()}


def test_the_host_writes_a_sequence_that_goes_on_once(
    plain: Engine, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = never_ahead(plain, monkeypatch)
    for key, ask in ASKS.items():
        writes.clear()
        assert alone(plain, ask) == want[key]
        # Its prompt in chunks of 16 and 4 at most, and its first step.
        assert writes == [*[16] * (len(ask.ids) // 16), len(ask.ids) % 16, 1]


def test_drafts_that_are_the_devices_own_are_not_written(
    engine: Engine, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widths of an engine that drafts differ, and each is written once."""
    want = never_ahead(engine, monkeypatch)
    engine.use_store(None)
    writes.clear()
    answer = alone(engine, ASKS["one"])
    assert answer == want["one"]
    decoded = writes[2:]
    assert len(decoded) == len(set(decoded)) <= 6


def test_neighbours_come_and_go(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    want = never_ahead(plain, monkeypatch)
    assert run(plain, **ASKS) == want
    for late in range(1, 8):
        plain.submit("one", ASKS["one"])
        steps = [step for _ in range(late) for step in plain.step()]
        plain.submit("two", ASKS["two"])
        assert collected([*steps, *drain(plain)]) == want


@pytest.mark.parametrize("after", range(1, 6))
def test_a_cancelled_neighbour(plain: Engine, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Its step may be under way: the other one's is run again, its slot is the next one's."""
    want = never_ahead(plain, monkeypatch)
    plain.submit("gone", greedy(5, 7, 20, ignore_eos=True))
    plain.submit("one", ASKS["one"])
    steps = [step for _ in range(after) for step in plain.step()]
    plain.cancel("gone")
    plain.submit("two", ASKS["two"])
    steps = [step for step in [*steps, *drain(plain)] if step.key != "gone"]
    assert collected(steps) == want


def test_nothing_is_launched_for_an_answer_that_ends(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = never_ahead(plain, monkeypatch)["one"]
    place = next(n for n in range(3, len(ids)) if ids[n] not in ids[:n])
    stopped = greedy(1, 20, 12, ignore_eos=True, stop_ids=frozenset({ids[place]}))
    launched: list[bool] = []
    decode = Plans.decode

    def watched(self: Plans, parts: Any, again: Any = None) -> Any:
        results = decode(self, parts, again)
        launched.append(self._ahead is not None)
        return results

    monkeypatch.setattr(Plans, "decode", watched)
    for ask, want in ((ASKS["one"], (ids, "length")), (stopped, (ids[:place], "stop"))):
        launched.clear()
        assert alone(plain, ask) == want
        assert launched.count(True) > 1
        assert launched == [*[True] * (len(launched) - 1), False]
