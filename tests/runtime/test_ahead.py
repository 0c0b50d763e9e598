"""Steps that follow from the last one: what the host writes for them, and what becomes of those
that were queued before anybody asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import (
    MAX_SEQ,
    Answer,
    ahead,
    alone,
    collected,
    drain,
    greedy,
    open_engine,
    run,
    seeded,
)
from ultraflash.runtime import Engine, Generation, step_io
from ultraflash.runtime.interpret import NumpyRunner
from ultraflash.runtime.plans import Plans
from ultraflash.runtime.store import LocalStore

PLAIN: list[Engine] = []
LONG = greedy(1, 20, 40, ignore_eos=True)
ASKS = {"one": greedy(1, 20, 12, ignore_eos=True), "two": seeded(2, 9, 15, ignore_eos=True)}


@pytest.fixture
def plain(engine_cache: Path) -> Iterator[Engine]:
    """An engine without drafting, as on a GPU: a step may be queued behind one under way."""
    if not PLAIN:
        PLAIN.append(ahead(open_engine(engine_cache, draft_block=0, store_bytes=0)))
    yield PLAIN[0]
    PLAIN[0].close()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the plan of every step that the host laid out, or told who goes on."""
    seen: list[int] = []

    def counted(write: Any) -> Any:
        def call(runner: Any, parts: Any) -> None:
            seen.append(runner.plan.rows)
            write(runner, parts)

        return call

    for name in ("write_step", "write_follow"):
        monkeypatch.setattr(step_io, name, counted(getattr(step_io, name)))
    return seen


def never_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """Each answer of an engine that is told everything and launches when it is asked."""
    with monkeypatch.context() as patch:
        patch.setattr(Plans, "_follows", lambda self, part: False)
        patch.setattr(engine, "_repeats", lambda sessions: False)
        return {key: alone(engine, ask) for key, ask in ASKS.items()}


def test_the_host_writes_a_sequence_that_goes_on_once(
    plain: Engine, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = never_ahead(plain, monkeypatch)
    for key, ask in ASKS.items():
        writes.clear()
        assert alone(plain, ask) == want[key]
        # Its prompt in chunks of 16 and 4 at most, and its first step.
        assert writes == [*[16] * (len(ask.ids) // 16), 16 if len(ask.ids) % 16 > 4 else 4, 1]


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


def test_what_is_queued_for_an_answer_that_ends(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing behind its last token, which the numbers know; one step behind a stop id."""
    ids, _ = never_ahead(plain, monkeypatch)["one"]
    queued: list[bool] = []
    decode = Plans.decode

    def watched(self: Plans, *step: Any) -> Any:
        results = decode(self, *step)
        queued.append(self._ahead is not None)
        return results

    monkeypatch.setattr(Plans, "decode", watched)
    for ask, want, behind in (
        (ASKS["one"], (ids, "length"), False),
        (stopping(ids), (ids[: stop_of(ids)], "stop"), True),
    ):
        queued.clear()
        assert alone(plain, ask) == want
        assert queued == [*[True] * (len(queued) - 1), behind]
        assert len(queued) > 2
        assert plain._plans._ahead is None, "nobody waits for it, and its slot is free"


def test_a_neighbour_that_stops(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of both is under way: the other one's is run again."""
    want = never_ahead(plain, monkeypatch)
    ids = want["one"][0]
    answers = run(plain, one=stopping(ids), two=ASKS["two"])
    assert answers == {"one": (ids[: stop_of(ids)], "stop"), "two": want["two"]}


def test_the_context_s_end(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is queued for a position that a slot lacks, whatever max_tokens says."""
    ask = greedy(3, MAX_SEQ - 9, 50, ignore_eos=True)
    positions: list[int] = []
    launch = NumpyRunner.launch

    def watched(runner: NumpyRunner, place: int = 0) -> None:
        launch(runner, place)
        positions.append(int(runner.read("io.position").max()))

    monkeypatch.setattr(NumpyRunner, "launch", watched)
    ids, finish = alone(plain, ask)
    assert (len(ids), finish) == (9, "length")
    assert max(positions) == MAX_SEQ - 2  # the last token is never processed


def test_points_taken_while_a_step_is_under_way(
    engine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same bytes under the same keys as without such steps: where the answer goes on behind them,
    and at its end, where a stop id leaves a row too many.
    """
    engine = ahead(open_engine(engine_cache, draft_block=0, segment_tokens=8))
    ids, _ = alone(engine, LONG)
    ask = replace(LONG, stop_ids=frozenset({ids[stop_of(ids, 20)]}))
    kept: list[LocalStore] = []
    for patched in (True, False):
        store = LocalStore(1 << 26)
        engine.use_store(store)
        with monkeypatch.context() as patch:
            if patched:
                patch.setattr(engine, "_repeats", lambda sessions: False)
            assert alone(engine, ask) == (ids[: stop_of(ids, 20)], "stop")
        drain(engine)
        kept.append(store)
    plain, queued = kept
    lengths = sorted(entry.point.length for entry in plain._entries.values())
    assert {24, 32} < set(lengths)
    assert lengths[-1] == 20 + stop_of(ids, 20)
    assert queued._entries == plain._entries
    assert queued._segments == plain._segments
    engine.close()


def stop_of(ids: Sequence[int], first: int = 3) -> int:
    """The first place behind a few others where an answer says something new."""
    return next(n for n in range(first, len(ids)) if ids[n] not in ids[:n])


def stopping(ids: Sequence[int]) -> Generation:
    """What says these ids, and stops inside."""
    return replace(ASKS["one"], stop_ids=frozenset({ids[stop_of(ids)]}))
