"""Steps that are queued before the record in front of them is read, with drafting: the device
chooses how many drafts they verify, and answers are those of an engine that waits for each record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.device_drafts import force_drafts
from helpers.engines import (
    MAX_SEQ,
    Answer,
    ahead,
    alone,
    assert_no_slot_is_lost,
    collected,
    drain,
    greedy,
    open_engine,
    prompt,
    run,
)
from ultraflash.runtime import Engine, Generation, Sampling, Step
from ultraflash.runtime.interpret import NumpyRunner
from ultraflash.runtime.plans import Plans, Result
from ultraflash.runtime.store import LocalStore

MODES = ("adaptive", "fixed", "all")
every_mode = pytest.mark.parametrize("mode", MODES)
OPEN: dict[str, Engine] = {}
SETTINGS: dict[str, object] = {"store_bytes": 0, "max_rows": 6}
ASK = greedy(1, 20, 40, ignore_eos=True)
HOT = Sampling(temperature=30, top_p=0.9, seed=3)  # target and drafts agree now and then


@pytest.fixture
def engines(engine_cache: Path) -> Iterator[dict[str, Engine]]:
    """One of each mode as on a GPU, and `plain` without drafting, which waits for each record."""
    if not OPEN:
        for mode in MODES:
            OPEN[mode] = ahead(open_engine(engine_cache, width=mode, **SETTINGS))
        OPEN["plain"] = open_engine(engine_cache, draft_block=0, **SETTINGS)
    yield OPEN
    for engine in OPEN.values():
        engine.close()
        assert_no_slot_is_lost(engine)


@dataclass
class Seen:
    """An engine's decode steps as they pass by."""

    queued: list[bool] = field(default_factory=list)  # whether another one was queued behind it
    results: list[list[Result]] = field(default_factory=list)

    def clear(self) -> None:
        self.queued.clear()
        self.results.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, decode = Seen(), Plans.decode

    def watched(self: Plans, *step: Any) -> list[Result]:
        results = decode(self, *step)
        found.queued.append(self._ahead is not None)
        found.results.append(results)
        return results

    monkeypatch.setattr(Plans, "decode", watched)
    return found


def force(
    patch: pytest.MonkeyPatch, engines: dict[str, Engine], *asks: Generation
) -> dict[int, list[int]]:
    """Right proposals for these requests. Their plain answers, by place, as long as a slot is."""
    plain = engines["plain"]
    answers = {
        n: alone(plain, replace(ask, max_tokens=MAX_SEQ, ignore_eos=True, stop_ids=frozenset()))[0]
        for n, ask in enumerate(asks)
    }
    texts = [[*ask.ids, *answers[n]] for n, ask in enumerate(asks)]
    force_drafts(patch, texts, plain.model.vocab)
    return answers


def stop_of(ids: Sequence[int], first: int = 10) -> int:
    """The first place behind some others where an answer says something new."""
    return next(n for n in range(first, len(ids)) if ids[n] not in ids[:n])


@every_mode
def test_answers_are_those_without_drafting(
    engines: dict[str, Engine], mode: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = force(monkeypatch, engines, ASK)[0][:40]
    seen.clear()
    assert alone(engines[mode], ASK) == (want, "length")
    accepted, kept = (
        {getattr(r, name) for step in seen.results for r in step} for name in ("accepted", "kept")
    )
    most = 2 if mode == "fixed" else 5  # a fixed width leaves a neighbour its share
    assert len(accepted) > most // 2
    assert max(kept) == most
    # Only where the answer may end with the step nothing is queued behind it.
    left = [40 - 1]
    for step in seen.results:
        left.append(left[-1] - 1 - step[0].accepted)
    assert seen.queued == [tokens > 1 + min(tokens - 1, 5) for tokens in left[:-1]]
    assert seen.queued.count(True) > 5


def test_a_step_that_follows_is_laid_out_by_the_device(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one plan, whatever the width."""
    plans: set[int] = set()
    launch = NumpyRunner.launch

    def watched(runner: NumpyRunner, place: int = 0) -> None:
        if runner.plan.name == "decode":
            plans.add(runner.plan.rows)
            assert runner.read("io.follows").tolist() != [-1]
        launch(runner, place)

    force(monkeypatch, engines, ASK)
    monkeypatch.setattr(NumpyRunner, "launch", watched)
    alone(engines["adaptive"], ASK)
    assert plans == {6}


@pytest.mark.parametrize("mode", ["adaptive", "fixed"])
def test_a_seed_repeats_whether_or_not_steps_are_queued(
    engines: dict[str, Engine], mode: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token and width for width; also where the host decides, step by step."""
    engine, ask = engines[mode], Generation(prompt(7, 11), 40, HOT, ignore_eos=True)
    found: list[tuple[Answer, list[list[Result]]]] = []
    for places, known in ((2, True), (1, True), (1, False), (2, False)):
        with monkeypatch.context() as patch:
            patch.setattr(engine._backend, "places", places)
            if not known:
                patch.setattr(Plans, "_follows", lambda self, part: False)
                patch.setattr(engine, "_repeats", lambda sessions: False)
            seen.clear()
            found.append((alone(engine, ask), list(seen.results)))
    assert all(each == found[0] for each in found)
    results = [r for step in found[0][1] for r in step]
    assert sum(r.accepted for r in results) > 0
    assert len({r.kept for r in results}) > 2


@every_mode
def test_a_stop_inside_accepted_drafts(
    engines: dict[str, Engine], mode: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the step behind is under way: nobody waits for more than that one."""
    ids, inside = force(monkeypatch, engines, ASK)[0], 0
    for first in range(8, 30):
        stop = stop_of(ids, first)
        ask = replace(ASK, max_tokens=60, stop_ids=frozenset({ids[stop]}))
        seen.clear()
        assert alone(engines[mode], ask) == (ids[:stop], "stop")
        assert seen.queued[-1]
        assert engines[mode]._plans._ahead is None
        given = 1 + sum(1 + step[0].accepted for step in seen.results)
        inside += given > stop + 1
    assert inside > 3


def test_eos_is_banned_until_there_are_enough_tokens(
    engines: dict[str, Engine], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ban ends at a position, wherever steps begin."""
    ids = alone(engines["plain"], ASK)[0]
    eos = ids[stop_of(ids)]
    for engine in engines.values():
        monkeypatch.setattr(engine, "model", replace(engine.model, eos=eos))
    for least in (0, 3, 12, 13, 20, 30):
        ask = replace(ASK, min_tokens=least, ignore_eos=False)
        want = alone(engines["plain"], ask)
        with monkeypatch.context() as patch:
            force_drafts(patch, [[*ask.ids, *want[0], eos]], engines["plain"].model.vocab)
            seen.clear()
            assert alone(engines["adaptive"], ask) == want
            assert any(seen.queued)


def test_the_end_of_the_context(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = greedy(3, MAX_SEQ - 30, 90, ignore_eos=True)
    want = force(monkeypatch, engines, ask)[0]
    positions: list[int] = []
    launch = NumpyRunner.launch

    def watched(runner: NumpyRunner, place: int = 0) -> None:
        launch(runner, place)
        positions.append(int(runner.read("io.position").max()))

    monkeypatch.setattr(NumpyRunner, "launch", watched)
    assert alone(engines["all"], ask) == (want, "length")
    assert len(want) == 30
    assert max(positions) == MAX_SEQ - 2  # the last token is never processed


@every_mode
def test_two_conversations(
    engines: dict[str, Engine], mode: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while a step of the first is under way, and goes before it ends."""
    other = greedy(2, 9, 12, ignore_eos=True)
    answers = force(monkeypatch, engines, ASK, other)
    want = {"one": (answers[0][:40], "length"), "two": (answers[1][:12], "length")}
    engine = engines[mode]
    for late in range(2, 9):
        engine.submit("one", ASK)
        steps = [step for _ in range(late) for step in engine.step()]
        engine.submit("two", other)
        assert collected([*steps, *drain(engine)]) == want
        assert any(len(step) == 2 for step in seen.results)
    assert run(engine, one=ASK, two=other) == want


@every_mode
def test_a_neighbour_that_is_cancelled(
    engines: dict[str, Engine], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = greedy(2, 9, 30, ignore_eos=True)
    answers = force(monkeypatch, engines, ASK, other)
    engine = engines[mode]
    for after in range(2, 7):
        engine.submit("gone", other)
        engine.submit("one", ASK)
        steps: list[Step] = [step for _ in range(after) for step in engine.step()]
        engine.cancel("gone")
        left = [step for step in [*steps, *drain(engine)] if step.key != "gone"]
        assert collected(left) == {"one": (answers[0][:40], "length")}


def test_a_sequence_that_is_cancelled_while_its_next_step_is_under_way(
    engines: dict[str, Engine], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = force(monkeypatch, engines, ASK)
    engine = engines["adaptive"]
    for after in range(3, 7):
        engine.submit("gone", ASK)
        for _ in range(after):
            engine.step()
        assert seen.queued[-1]
        engine.cancel("gone")
        assert engine._plans._ahead is None
        assert alone(engine, ASK) == (answers[0][:40], "length")


def test_points_taken_while_a_step_is_under_way(
    engines: dict[str, Engine], engine_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same bytes under the same keys as from steps that nothing was queued behind: where the answer
    goes on, and at its end, where a stop leaves accepted drafts and another step too many.
    """
    ids = force(monkeypatch, engines, ASK)[0]
    stop = stop_of(ids, 24)
    ask = replace(ASK, max_tokens=60, stop_ids=frozenset({ids[stop]}))
    engine = ahead(open_engine(engine_cache, width="all", segment_tokens=8, max_rows=6))
    kept: list[LocalStore] = []
    for queued in (False, True):
        store = LocalStore(1 << 26)
        engine.use_store(store)
        with monkeypatch.context() as patch:
            if not queued:
                patch.setattr(engine, "_repeats", lambda sessions: False)
            assert alone(engine, ask) == (ids[:stop], "stop")
        drain(engine)
        kept.append(store)
    lengths = sorted(entry.point.length for entry in kept[0]._entries.values())
    assert {24, 32} < set(lengths)
    assert lengths[-1] == 20 + stop
    assert kept[1]._entries == kept[0]._entries
    assert kept[1]._segments == kept[0]._segments
    engine.close()


def test_what_is_learnt_is_what_steps_took(
    engines: dict[str, Engine], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the runner: how long a step took, not how long anybody waited for it; and
    confidences meet what was accepted of them.
    """
    force(monkeypatch, engines, ASK)
    engine = engines["all"]
    times = {rows: 7.0 + rows for rows in range(1, 7)}
    launch = NumpyRunner.launch

    def timed(runner: NumpyRunner, place: int = 0) -> None:
        launch(runner, place)
        if runner.plan.name == "decode":
            took = int(1e6 * times[1 + int(runner.read("io.kept")[0])])
            runner._times[place] = 100, 100 + took

    monkeypatch.setattr(NumpyRunner, "launch", timed)
    before = engine._widths.chooser.calibration.counts.sum(axis=2)[2]
    for _ in range(2):  # the first step of a width does not count
        alone(engine, ASK)
    learnt = engine._widths.chooser.times
    assert learnt.samples[5][-3:] == (13.0,) * 3
    after = engine._widths.chooser.calibration.counts.sum(axis=2)[2]
    assert (after > before).all()
