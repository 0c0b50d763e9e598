"""Engines that speculate: nobody can tell from their answers.

A seed repeats among neighbours, greedy answers are those without drafting, and requests end where
they should when several tokens come at once. Proposals are forced where acceptance matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from helpers.engines import Answer, alone, assert_no_slot_is_lost, greedy, open_engine, prompt, run
from helpers.forced import ForcedDrafts, Text
from ultraflash.graphs.width import Rule
from ultraflash.runtime import Engine, Generation, Sampling
from ultraflash.runtime.plans import Plans, Result
from ultraflash.runtime.step_io import Part

B = 5
MODES = ("adaptive", "fixed", "all")
every_mode = pytest.mark.parametrize("mode", MODES)


@dataclass
class Watched:
    """Verified parts and results of an engine's decode steps, as they pass by."""

    plans: Plans
    steps: list[tuple[list[Part], list[Result]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.plans, name)

    def decode(
        self, parts: list[Part], rule: Rule, ahead: int, meanwhile: Callable[[], None]
    ) -> list[Result]:
        results = self.plans.decode(parts, rule, ahead, meanwhile)
        cut = [p._replace(ids=p.ids[: 1 + r.kept]) for p, r in zip(parts, results, strict=True)]
        self.steps.append((cut, results))
        return results


OPEN: dict[str, Engine] = {}
# Small steps, so that neighbours compete for rows.
SETTINGS: dict[str, object] = {
    "max_seq": 96,
    "store_bytes": 0,
    "max_rows": 6,
    "prefill_chunks": (16, 96),
}


@pytest.fixture
def engines(engine_cache: Path) -> Iterator[dict[str, Engine]]:
    """One of each mode, and `plain` without drafting; opened once, idle before and after."""
    if not OPEN:
        for mode in MODES:
            OPEN[mode] = open_engine(engine_cache, width=mode, **SETTINGS)
        OPEN["plain"] = open_engine(engine_cache, draft_block=0, **SETTINGS)
    plans = {name: engine._plans for name, engine in OPEN.items()}
    yield OPEN
    for name, engine in OPEN.items():
        engine.close()
        assert_no_slot_is_lost(engine)
        engine._plans = plans[name]


def force(engine: Engine, texts: Sequence[Text], depth: int | None = None) -> Counter[int]:
    """Propose from these texts: right up to `depth`, or every depth in turn. Counts what stays."""
    lengths: Counter[int] = Counter()
    if depth is not None:
        lengths.update({n: 10**6 for n in range(B + 1) if n != depth})
    engine._plans = ForcedDrafts(engine._plans, texts, B, engine.model.vocab, lengths)
    return lengths


_plain: dict[tuple[Generation, int], Answer] = {}


def plain(engines: dict[str, Engine], request: Generation) -> Answer:
    """The answer without drafting; asked for once."""
    engine = engines["plain"]
    key = request, engine.model.eos
    if key not in _plain:
        _plain[key] = alone(engine, request)
    return _plain[key]


def text_of(engines: dict[str, Engine], request: Generation, count: int) -> Text:
    """A prompt and what it would say if nothing ended it."""
    free = replace(request, max_tokens=count, ignore_eos=True, stop_ids=frozenset(), min_tokens=0)
    return Text([*request.ids, *plain(engines, free)[0]], len(request.ids))


# --- chance repeats ---

# Hot enough for target and drafts to agree now and then.
WARM, HOT = Sampling(temperature=4, seed=1), Sampling(temperature=30, top_p=0.9, seed=3)


@pytest.mark.parametrize(("mode", "sampling"), [("adaptive", WARM), ("fixed", HOT)], ids=str)
def test_a_seed_repeats_among_neighbours(
    engines: dict[str, Engine], mode: str, sampling: Sampling
) -> None:
    """Token for token and draft for draft, beside all kinds of others that come and go."""
    engine = engines[mode]
    mine = Generation(prompt(7, 11), 10, sampling, ignore_eos=True)
    watched = Watched(engine._plans)
    engine._plans = watched  # type: ignore[assignment]
    want = alone(engine, mine)
    parts = [p for step, _ in watched.steps for p in step]
    accepted = [r.accepted for _, results in watched.steps for r in results]
    assert sum(accepted) > 0, "nothing was accepted: this would say little"
    others = {
        "greedy": [greedy(1, 5, 9, ignore_eos=True)],
        "seeded": [replace(mine, sampling=replace(sampling, seed=99), max_tokens=9)],
        "unseeded": [Generation(prompt(3, 30), 9, Sampling(2.0), ignore_eos=True)],
    }
    for kind, neighbours in others.items():
        watched.steps.clear()
        for number, other in enumerate(neighbours):
            engine.submit(f"before{number}", other)
        engine.step()
        assert run(engine, mine=mine)["mine"] == want, kind
        seen = [p for step, _ in watched.steps for p in step if p.draw.seed == sampling.seed]
        assert [(p.start, list(p.ids)) for p in seen] == [(p.start, list(p.ids)) for p in parts]
        assert any(len(step) > 1 for step, _ in watched.steps), kind


def test_a_seed_repeats_on_an_engine_without_history(
    engines: dict[str, Engine], engine_cache: Path
) -> None:
    request = Generation(prompt(7, 11), 10, HOT, ignore_eos=True)
    fresh = open_engine(engine_cache, **SETTINGS)
    assert alone(fresh, request) == alone(engines["adaptive"], request)


def test_decode_steps_are_counted_from_one(engines: dict[str, Engine]) -> None:
    """The prefill, which drew the first drafts, was step 0; no number is drawn twice."""
    engine = engines["adaptive"]
    watched = engine._plans = Watched(engine._plans)  # type: ignore[assignment]
    alone(engine, Generation(prompt(7, 11), 10, HOT, ignore_eos=True))
    steps = [step[0].draw.step for step, _ in watched.steps]
    assert steps == list(range(1, len(steps) + 1))


# --- greedy is plain ---


@every_mode
@pytest.mark.parametrize("beside", [0, 1])
def test_greedy_answers_are_those_without_drafting(
    engines: dict[str, Engine], mode: str, beside: int
) -> None:
    """Proposals of every depth, and whatever widths the rule chooses; alone and beside another."""
    requests = [greedy(n, 6 + 11 * n, 18, ignore_eos=True) for n in range(1 + beside)]
    texts = [text_of(engines, request, 26) for request in requests]
    engine = engines[mode]
    lengths = force(engine, texts)
    answers = run(engine, **{f"r{n}": request for n, request in enumerate(requests)})
    for number, text in enumerate(texts):
        assert answers[f"r{number}"] == (text[text.prompt : text.prompt + 18], "length")
    assert len([n for n, count in lengths.items() if count]) > 1


def test_own_proposals(engines: dict[str, Engine]) -> None:
    request = greedy(4, 33, 10, ignore_eos=True)
    assert alone(engines["adaptive"], request) == plain(engines, request)


# --- how answers end when several tokens come at once ---

at_depth = pytest.mark.parametrize("depth", [2, B])
LENGTH, MOST = 12, 13  # of the prompt and of the answer


@pytest.fixture
def story(engines: dict[str, Engine]) -> tuple[Generation, Text]:
    """A greedy request whose first ten tokens are all different, and how it goes on."""
    for number in range(40):
        request = greedy(number, LENGTH, MOST)
        text = text_of(engines, request, MOST + B + 1)
        if len(set(text[LENGTH : LENGTH + 10])) == 10:
            return request, text
    raise AssertionError("no such prompt among forty")


def forced(engines: dict[str, Engine], text: Text, request: Generation, depth: int) -> Answer:
    """The answer when so many proposals are right in every step."""
    engine = engines["all"]
    plans = engine._plans
    force(engine, [text], depth)
    answer = alone(engine, request)
    engine._plans = plans
    return answer


@at_depth
@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 13])
def test_max_tokens_are_exact(
    engines: dict[str, Engine], story: tuple[Generation, Text], depth: int, count: int
) -> None:
    request, text = story
    short = replace(request, max_tokens=count, ignore_eos=True)
    want = text[LENGTH : LENGTH + count], "length"
    assert forced(engines, text, short, depth) == want


@pytest.mark.parametrize(("room", "depth"), [(1, B), (2, B), (5, 2), (6, B), (7, B), (8, 3)])
def test_the_context_is_exact(engines: dict[str, Engine], room: int, depth: int) -> None:
    request = greedy(3, 96 - room, 50, ignore_eos=True)
    text = text_of(engines, request, 50)
    assert forced(engines, text, request, depth) == (text[96 - room :], "length")
    assert len(text) == 96


@at_depth
@pytest.mark.parametrize("place", range(8))
def test_a_stop_id_ends_an_answer_wherever_it_comes(
    engines: dict[str, Engine], story: tuple[Generation, Text], depth: int, place: int
) -> None:
    """First, last or in the middle of the tokens of a step: nothing behind it is heard."""
    request, text = story
    stops = frozenset({text[LENGTH + place], 511})
    stopped = replace(request, ignore_eos=True, stop_ids=stops)
    want = text[LENGTH : LENGTH + place], "stop"
    assert forced(engines, text, stopped, depth) == want


@pytest.mark.parametrize("place", [4, 5, 6])
def test_a_stop_id_beside_the_last_token_allowed(
    engines: dict[str, Engine], story: tuple[Generation, Text], place: int
) -> None:
    request, text = story
    stops = frozenset({text[LENGTH + place]})
    stopped = replace(request, ignore_eos=True, stop_ids=stops, max_tokens=place + 1)
    tokens = text[LENGTH : LENGTH + place]
    assert forced(engines, text, stopped, B) == (tokens, "stop")
    assert forced(engines, text, replace(stopped, max_tokens=place), B) == (tokens, "length")


@pytest.fixture
def eos(
    engines: dict[str, Engine], story: tuple[Generation, Text], monkeypatch: pytest.MonkeyPatch
) -> int:
    """The story says EOS at its fifth token, in the middle of the first block."""
    end = story[1][LENGTH + 4]
    for engine in engines.values():
        monkeypatch.setattr(engine, "model", replace(engine.model, eos=end))
    return end


@at_depth
@pytest.mark.parametrize("least", [0, 4, 5, 9, MOST])
def test_min_tokens_keep_eos_away(
    engines: dict[str, Engine], story: tuple[Generation, Text], eos: int, depth: int, least: int
) -> None:
    """Row by row: EOS may come behind row i only when enough tokens stand before it.

    Proposals come from the free answer, EOS included, so that a banned draft is proposed too.
    """
    request, text = story
    held = replace(request, min_tokens=least)
    tokens, finish = forced(engines, text, held, depth)
    assert (tokens, finish) == plain(engines, held)
    assert len(tokens) >= least
    assert eos not in tokens
    if least <= 4:
        assert (tokens, finish) == (text[LENGTH : LENGTH + 4], "stop")


@at_depth
@pytest.mark.parametrize("least", [5, 8, 11])
def test_min_tokens_in_the_middle_of_a_block(
    engines: dict[str, Engine], story: tuple[Generation, Text], eos: int, depth: int, least: int
) -> None:
    """Proposals are the held answer itself: all stay, and EOS is banned in some rows only."""
    request, _ = story
    held = replace(request, min_tokens=least)
    want = plain(engines, held)
    text = Text([*request.ids, *want[0], *[eos] * (B + 1)], LENGTH)
    assert forced(engines, text, held, depth) == want


@at_depth
def test_ignore_eos_goes_on(
    engines: dict[str, Engine], story: tuple[Generation, Text], eos: int, depth: int
) -> None:
    request, text = story
    free = replace(request, ignore_eos=True)
    tokens, finish = forced(engines, text, free, depth)
    assert (tokens, finish) == plain(engines, free)
    assert (len(tokens), finish) == (MOST, "length")
    assert eos not in tokens
    stopped = replace(free, stop_ids=frozenset({tokens[6]}))
    assert forced(engines, Text([*request.ids, *tokens], LENGTH), stopped, depth)[1] == "stop"


def test_a_step_delivers_all_that_it_accepted(
    engines: dict[str, Engine], story: tuple[Generation, Text]
) -> None:
    """And tells how many rows it took; no row is spent on what could not count."""
    request, text = story
    engine = engines["all"]
    force(engine, [text], B)
    engine.submit("a", replace(request, max_tokens=15, ignore_eos=True))
    steps = []
    while engine.has_work:
        steps += engine.step()
    assert [len(step.tokens) for step in steps] == [1, 6, 6, 2]
    assert [step.rows for step in steps] == [0, 6, 6, 2]
    assert [step.finish for step in steps] == [None, None, None, "length"]


def test_the_next_request_in_a_slot_sees_nothing_of_what_a_stop_cut_off(
    engines: dict[str, Engine], story: tuple[Generation, Text]
) -> None:
    """More rows were processed than count."""
    request, text = story
    stopped = replace(request, ignore_eos=True, stop_ids=frozenset({text[LENGTH + 2]}))
    other = greedy(30, 20, 6, ignore_eos=True)
    for _ in range(3):  # every slot
        assert forced(engines, text, stopped, B)[1] == "stop"
    assert alone(engines["all"], other) == plain(engines, other)
