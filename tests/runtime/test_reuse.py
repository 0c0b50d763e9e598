"""Conversations that come back: how much is reused, and that the answer does not know.

The yardstick is the same engine without a store. The bundled checkpoint has a window of 16 and
rings of 64; segments are 32 tokens here. All of it once more on the device, where there is one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.desk import some_ids
from helpers.forced import ForcedDrafts, Text
from helpers.points import ASSISTANT, EOS, USER, Rules
from helpers.reuse import (
    BOS,
    EVERY,
    GREEDY,
    OFTEN,
    SYSTEM,
    THINK,
    THINK_END,
    Turn,
    ask,
    end_turn,
    lengths,
    open_engine,
    render,
    run,
    without_store,
)
from ultraflash.runtime import Engine, Generation, RequestError, Sampling
from ultraflash.runtime.content import image_digest
from ultraflash.runtime.request import ImageSpan
from ultraflash.runtime.reuse import Reuse
from ultraflash.runtime.session import Session
from ultraflash.runtime.store import Hit, LocalStore, Role

IMAGE, WINDOW, TAIL = 511, 16, 24
DRAWN = Sampling(1.0, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def opened(folder: Path, backend: str) -> Engine:
    engine = open_engine(folder, backend)
    assert engine.store is not None
    assert engine.store.stats().points == 0, "the warm-up leaves nothing"
    return engine


@pytest.fixture
def engine(opened: Engine) -> Iterator[Engine]:
    """With an empty store, and with nothing left to do afterwards."""
    opened.use_store(LocalStore(1 << 26))
    yield opened
    opened.close()


# --- a conversation of several turns ---


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no_tools"])
def test_six_turns(engine: Engine, tools: bool, sampling: Sampling) -> None:
    """Thinking on and off; answers that end by themselves and answers that are cut."""
    turns: list[Turn] = []
    points, reused, system = Rules(WINDOW, EVERY), [], some_ids(7, 19)
    for number in range(6):
        turns.append(Turn(some_ids(20 + number, 3 + 4 * number), thinking=number % 3 != 1))
        ids = render(turns, tools, system)
        how: dict[str, Any] = {"sampling": sampling, "stop_ids": OFTEN}
        how["max_tokens"] = 5 if number == 3 else 14
        answer = ask(engine, ids, **how)
        assert answer.cached == points.best(ids)
        assert answer.said == without_store(engine, ids, **how).said
        points.note(ids, answer.tokens, answer.finish)
        end_turn(turns[-1], answer)
        reused.append(answer.cached)
    assert reused[0] == 0
    assert all(later > earlier for earlier, later in pairwise(reused))
    assert reused[-1] > 0.6 * len(ids)
    assert len(lengths(engine, Role.SYSTEM)) == 1


def test_the_answer_itself_is_reused_when_it_ended_by_itself(engine: Engine) -> None:
    ids = [BOS, USER, *some_ids(3, 30), ASSISTANT, THINK_END]
    answer = ask(engine, ids, 40, stop_ids=OFTEN)
    assert answer.finish == "stop"
    whole = [*ids, *answer.tokens]
    follow = [*whole, EOS, USER, 9, ASSISTANT, THINK_END]
    assert ask(engine, follow).cached == len(whole)
    # The very same prompt again: all but what follows the last header.
    assert ask(engine, ids).cached == len(ids) - 2


def test_a_new_conversation_reuses_the_system_prompt(engine: Engine) -> None:
    system = some_ids(8, 25)
    first, second = (
        [BOS, SYSTEM, *system, USER, *some_ids(n, 9), ASSISTANT, THINK] for n in (1, 2)
    )
    ask(engine, first)
    answer = ask(engine, second)
    assert answer.cached == 2 + len(system)
    assert answer.said == without_store(engine, second).said
    # One shorter than a window is not worth a point.
    for n in (3, 4):
        assert ask(engine, [BOS, USER, *some_ids(n, 9), ASSISTANT, THINK]).cached == 0


# --- every place where a point can be ---


def test_regular_points_of_a_long_prompt(engine: Engine) -> None:
    """Chunks of 128 rows run past several of them; each is as good as the others."""
    ids = some_ids(5, 230)
    ask(engine, ids, 1)
    assert lengths(engine, Role.REGULAR) == list(range(EVERY, 230, EVERY))
    for n in range(EVERY, 230, EVERY):
        branch = [*ids[: n + 5], *some_ids(n, 4)]
        answer = ask(engine, branch, 3)
        assert answer.cached == n
        assert answer.said == without_store(engine, branch, 3).said


def test_regular_points_of_a_long_answer(engine: Engine) -> None:
    ids = some_ids(6, 20)
    answer = ask(engine, ids, 60, ignore_eos=True)
    assert lengths(engine, Role.REGULAR) == [32, 64]
    assert lengths(engine, Role.TURN) == [79]  # the 80th token was never processed
    branch = [*ids, *answer.tokens[:50], 7, 8]
    again = ask(engine, branch)
    assert again.cached == 64
    assert again.said == without_store(engine, branch).said


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65])
def test_lengths_around_a_segment(engine: Engine, length: int) -> None:
    ids = some_ids(length, length)
    ask(engine, ids, 1)
    longer = [*ids, 3]
    answer = ask(engine, longer)
    assert answer.cached == length // EVERY * EVERY
    assert answer.said == without_store(engine, longer).said


@pytest.mark.parametrize("odd", [0, 1], ids=["even", "odd"])
def test_a_stop_among_accepted_drafts(
    engine: Engine, odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More was processed than counts: the point stands before the token that ended the answer."""
    ids = [BOS, USER, *some_ids(30, 20 + odd), ASSISTANT, THINK_END]
    plain = without_store(engine, ids, 24, ignore_eos=True).tokens
    beyond: list[int] = []
    finish = Reuse.finish

    def watched(self: Reuse, session: Session) -> None:
        beyond.append(session.done - len(session.ids))
        finish(self, session)

    monkeypatch.setattr(Reuse, "finish", watched)
    seen: Counter[int] = Counter()
    for at in range(4, 22, 3):
        stop = plain[at]
        if stop in plain[:at]:
            continue
        text = Text([*ids, *plain], len(ids))
        forced = ForcedDrafts(engine._plans, [text], 5, engine.model.vocab, seen)
        forced._by_slot = dict.fromkeys(range(4), text)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_plans", forced)
            answer = ask(engine, ids, 24, stop_ids=frozenset({stop}))
        assert answer.tokens == plain[:at]
        follow = [*ids, *plain[:at], EOS, USER, 9, ASSISTANT, THINK_END]
        again = ask(engine, follow, 2)
        assert again.cached == len(ids) + at
        assert again.said == without_store(engine, follow, 2).said
    assert max(beyond) > 1
    assert len({n for n in beyond if n > 0}) > 1


@pytest.mark.parametrize("how", ["length", "cancel"])
def test_an_answer_that_was_cut_leaves_a_point(engine: Engine, how: str) -> None:
    ids = some_ids(12, 21)
    if how == "length":
        tokens = ask(engine, ids, 9, ignore_eos=True).tokens
    else:
        engine.submit("k", Generation(tuple(ids), 100, GREEDY, ignore_eos=True))
        tokens = []
        while len(tokens) < 9:
            tokens += [token for step in engine.step() for token in step.tokens]
        engine.cancel("k")
        while engine.has_work:  # the point is still on its way to the host
            assert not engine.step()
    known = [*ids, *tokens[:-1]]
    follow = [*known, EOS, USER, 9, ASSISTANT, THINK_END]
    answer = ask(engine, follow)
    assert answer.cached == len(known)
    assert answer.said == without_store(engine, follow).said


def test_a_cancelled_prompt_leaves_only_what_it_passed(engine: Engine) -> None:
    ids = some_ids(13, 300)
    engine.submit("k", Generation(tuple(ids), 5, GREEDY))
    engine.step()
    engine.cancel("k")
    passed = lengths(engine, Role.REGULAR)
    assert passed
    assert passed == list(range(EVERY, passed[-1] + 1, EVERY))
    assert lengths(engine, Role.TURN) == []
    answer = ask(engine, ids)
    assert answer.cached == passed[-1]
    assert answer.said == without_store(engine, ids).said


# --- several, elsewhere, under pressure, or not at all ---


def test_three_conversations_side_by_side_under_pressure(engine: Engine) -> None:
    """A store for about five points: most are gone when they are wanted, nothing is mixed up."""
    store = LocalStore(110_000)
    engine.use_store(store)
    talks: list[list[Turn]] = [[], [], []]
    for number in range(3):
        for talk, turns in enumerate(talks):
            turns.append(Turn(some_ids(10 * talk + number, 6), thinking=talk == 1))
        prompts = [tuple(render(turns, True, some_ids(1, 18))) for turns in talks]
        requests = [Generation(ids, 8, DRAWN, stop_ids=OFTEN) for ids in prompts]
        answers = run(engine, *requests)
        engine.use_store(None)
        for turns, answer, want in zip(talks, answers, run(engine, *requests), strict=True):
            assert answer.tokens == want.tokens
            assert want.cached == 0
            end_turn(turns[-1], answer)
        engine.use_store(store)
        assert store.stats().nbytes <= 110_000
    assert store.stats().evicted > 2
    assert store.stats().hits > 2


def test_another_engine_goes_on(engine: Engine, folder: Path, backend: str) -> None:
    """As another server with the same store would: nothing of the first one is needed."""
    other = open_engine(folder, backend)
    assert other.fingerprint == engine.fingerprint
    other.use_store(engine.store)
    ids = [BOS, USER, *some_ids(40, 40), ASSISTANT, THINK]
    answer = ask(engine, ids, 40, stop_ids=OFTEN, sampling=DRAWN)
    assert answer.finish == "stop"
    follow = [*ids, *answer.tokens, EOS, USER, 9, ASSISTANT, THINK]
    moved = ask(other, follow, 20, sampling=DRAWN)
    assert moved.cached == len(ids) + len(answer.tokens)
    assert moved.said == without_store(engine, follow, 20, sampling=DRAWN).said


def test_a_store_that_is_off(folder: Path, backend: str) -> None:
    engine = open_engine(folder, backend, store_bytes=0)
    assert engine.store is None
    ids = [BOS, USER, *some_ids(41, 40), ASSISTANT, THINK]
    first, second = (ask(engine, ids, 3) for _ in range(2))
    assert first.said == second.said
    assert second.cached == 0


def test_broken_bytes_cost_time_and_nothing_else(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(LocalStore):
        spoil: Callable[[Hit], Hit] | None = None

        def find(self, keys: Sequence[bytes]) -> Hit | None:
            hit = super().find(keys)
            return self.spoil(hit) if hit and self.spoil else hit

    store = Broken(1 << 26)
    engine.use_store(store)
    ids = [BOS, SYSTEM, *some_ids(1, 30), USER, *some_ids(42, 30), ASSISTANT, THINK]
    want = ask(engine, ids)

    def shorter(hit: Hit) -> Hit:
        if hit.point.length < 40:
            return hit
        return replace(hit, point=replace(hit.point, data=hit.point.data[:-1]))

    store.spoil = shorter
    with caplog.at_level(logging.WARNING):
        answer = ask(engine, ids)
    assert answer.said == want.said
    assert answer.cached == 32  # the next one that is sound
    assert "a point of 63 tokens is no use" in caplog.text


# --- who shares with whom ---


def test_two_pictures_of_one_size_share_nothing(engine: Engine) -> None:
    """Fake image rows: to the model they are all the same token, to a cache they are not."""
    before = [BOS, USER, *some_ids(50, 32)]
    ids = [*before, *[IMAGE] * 40, *some_ids(51, 5), ASSISTANT, THINK_END]
    digests = [image_digest(data, 1) for data in (b"cat" * 1000, b"dog" * 1000)]
    cat, dog = ((ImageSpan(len(before), 40, digest),) for digest in digests)
    assert ask(engine, ids, images=cat).cached == 0
    assert ask(engine, ids, images=dog).cached == 32  # the text before it is the same
    assert ask(engine, ids, images=cat).cached == len(ids) - 2
    assert ask(engine, ids, images=dog).cached == len(ids) - 2
    assert ask(engine, ids).cached == 32
    moved = (ImageSpan(len(before) + 1, 39, digests[0]),)
    assert ask(engine, ids, images=moved).cached == 32


def test_pictures_are_refused_at_the_door(engine: Engine) -> None:
    span = ImageSpan(0, 1, image_digest(b"x", 1))
    with pytest.raises(RequestError, match="no vision yet") as caught:
        engine.submit("k", Generation((IMAGE, 3), 1, images=(span,)))
    assert caught.value.field == "images"


def test_salts_keep_tenants_apart(engine: Engine) -> None:
    ids = [BOS, USER, *some_ids(52, 40), ASSISTANT, THINK_END]
    assert ask(engine, ids, salt="a").cached == 0
    assert ask(engine, ids, salt="b").cached == 0
    assert ask(engine, ids).cached == 0
    assert ask(engine, ids, salt="a").cached == len(ids) - 2
