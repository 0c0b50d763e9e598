"""How many drafts an engine verifies (runtime/speculate.py), and that nobody can tell from answers.

Below the width rule itself, which test_width.py looks at: what sessions bring to it, what steps
teach it, and that requests end where they should when several tokens come at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.engines import Answer, alone, assert_no_slot_is_lost, greedy, open_engine, prompt, run
from helpers.forced import ForcedDrafts, Text
from ultraflash.runtime import ConfigError, Engine, Generation, Sampling
from ultraflash.runtime.plans import Plans, Result
from ultraflash.runtime.profiles import select_profile
from ultraflash.runtime.session import Session
from ultraflash.runtime.speculate import Widths
from ultraflash.runtime.step_io import Part

B = 5
MODES = ("adaptive", "fixed", "all")
every_mode = pytest.mark.parametrize("mode", MODES)
SURE, HOPELESS = 9.0, -9.0

# --- the rule between sessions and widths ---


def session(
    confidence: float | Sequence[float] = SURE, room: int = B, **sampling: object
) -> Session:
    """One that is decoding, with B drafts and so many tokens left behind the next one."""
    how = Sampling(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    request = Generation((5, 6, 7), room + 2, how)
    made = Session.start("k", request, 0, 1, 512)
    made.ids.append(8)  # the token behind the prompt
    made.drafts = tuple(range(10, 10 + B))
    made.confidence = (confidence,) * B if isinstance(confidence, float) else tuple(confidence)
    assert made.room == room
    return made


def seeded(confidence: float | Sequence[float] = SURE, room: int = B) -> Session:
    return session(confidence, room, temperature=1.0, seed=3)


def widths(mode: str = "adaptive", max_rows: int = 8, max_sequences: int = 2) -> Widths:
    return Widths(mode, select_profile("cpu", 1, B), max_rows, max_sequences)


def taught(rule: Widths, rows: int, ms: float, accepted: int = 0, steps: int = 40) -> None:
    """Steps of one sequence: so many rows, so long, so many drafts accepted."""
    for _ in range(steps + 1):  # the first one does not count
        result = Result(accepted, 9, (1,) * B, (0.0,) * B)
        rule.learn(ms, [(1.0,) * B], [rows - 1], [result])


@every_mode
def test_all_modes_give_each_session_a_number(mode: str) -> None:
    rule = widths(mode)
    for sessions in ([session()], [session(), seeded()], [seeded(), seeded()]):
        kept = rule.choose(sessions)
        assert len(kept) == len(sessions)
        assert all(0 <= n <= s.room for n, s in zip(kept, sessions, strict=True))
        assert len(kept) + sum(kept) <= 8


@every_mode
@pytest.mark.parametrize("room", range(B + 1))
def test_nobody_verifies_what_could_not_become_a_token(mode: str, room: int) -> None:
    for make in (session, seeded):
        assert widths(mode).choose([make(SURE, room)])[0] <= room
    assert widths("all").choose([session(HOPELESS, room)]) == (room,)


@every_mode
def test_sessions_without_drafts_decode_plainly(mode: str) -> None:
    """A server that does not draft: there are no confidences either."""
    bare = session(room=0)
    bare.drafts = bare.confidence = ()
    assert widths(mode).choose([bare, bare]) == (0, 0)


def test_all_deals_the_rows_that_there_are_one_by_one() -> None:
    """Whatever the confidences say and whatever was learnt."""
    rule = widths("all", 8, 3)
    assert rule.choose([session(HOPELESS)]) == (5,)
    assert rule.choose([session(), session(HOPELESS)]) == (3, 3)
    assert rule.choose([session()] * 3) == (2, 2, 1)
    assert rule.choose([session(room=1), session(), session(room=0)]) == (1, 4, 0)
    assert rule.choose([session(room=2), session(room=2), session(room=1)]) == (2, 2, 1)
    assert widths("all", 4, 4).choose([session()] * 4) == (0, 0, 0, 0)
    taught(rule, 3, 500.0)
    assert rule.choose([session(HOPELESS)]) == (5,)


THRESHOLDS = select_profile("cpu", 1, B).thresholds


def fixed_width(confidence: Sequence[float]) -> int:
    """The profile's rule in plain Python."""
    survival, kept = 1.0, 0
    for c, threshold in zip(confidence, THRESHOLDS, strict=True):
        survival *= 1 / (1 + np.exp(-c))
        if survival < threshold:
            break
        kept += 1
    return kept


def test_fixed_takes_the_profiles_thresholds_for_every_request(rng: np.random.Generator) -> None:
    rule, found = widths("fixed", 8, 1), set()
    for number in range(60):
        confidence = rng.normal(1.0, 2.0, B).tolist()
        want = fixed_width(confidence)
        found.add(want)
        for make in (session, seeded):
            assert rule.choose([make(confidence)]) == (want,)
        taught(rule, 1 + number % 6, float(rng.uniform(1, 100)), steps=2)  # it does not listen
    assert len(found) > 3


@pytest.mark.parametrize("mode", ["adaptive", "fixed"])
def test_a_seeded_request_knows_no_neighbours_no_clock_and_no_history(
    mode: str, rng: np.random.Generator
) -> None:
    fresh, old = widths(mode, 8, 2), widths(mode, 8, 2)
    for rows in (1, 4, 6):
        taught(old, rows, 700.0 * rows)
    for _ in range(40):
        mine = seeded(rng.normal(1.5, 2.0, B).tolist())
        (want,) = fresh.choose([mine])
        assert want <= 8 // 2 - 1  # its share of the widest step
        for other in (session(SURE), seeded(SURE), session(HOPELESS), session(room=0)):
            assert old.choose([mine, other])[0] == want
            assert old.choose([other, mine])[1] == want


@pytest.mark.parametrize("how", [{"seed": 3}, {"temperature": 1.0}, {}], ids=str)
def test_only_seeded_chance_has_to_repeat(how: dict[str, Any]) -> None:
    """Greedy answers are the same at any width; without a seed nothing is promised."""
    rule = widths("adaptive", 8, 1)
    for rows in range(6, 0, -1):
        taught(rule, rows, 1000.0 * rows if rows > 1 else 10.0)
    assert rule.choose([session(2.0, **how)]) == (0,)
    assert rule.choose([seeded(2.0)])[0] > 0


def test_adaptive_shares_by_survival() -> None:
    """Rows cost nothing here, so that all are given away: the likelier drafts get them."""
    rule = widths("adaptive", 8, 2)
    for rows in range(1, 9):
        taught(rule, rows, 10.0)
    sure, unsure = session(3.0), session(-1.0)
    assert rule.choose([sure, unsure]) == (5, 1)
    assert rule.choose([unsure, sure]) == (1, 5)
    assert rule.choose([sure, unsure, seeded(SURE)])[2] == 3  # reserved, whatever is left


def test_a_step_cannot_have_fewer_rows_than_sequences() -> None:
    with pytest.raises(ConfigError, match="max_sequences 9 is more than the 8 rows"):
        widths("all", 8, 9)


# --- what steps teach ---


def learnt(rule: Widths) -> tuple[float, ...]:
    return tuple(rule.chooser.times.times_ms.tolist())


def test_the_first_run_of_a_width_teaches_nothing() -> None:
    """It compiles. A width is rows and sequences: each is a plan of its own."""
    rule = widths()
    before, result = rule.chooser, Result(1, 9, (1,) * B, (0.0,) * B)
    one, two = [(1.0,) * B], [(1.0,) * B] * 2
    rule.learn(9000.0, one, [3], [result])
    rule.learn(9000.0, two, [1, 1], [result] * 2)  # four rows as well, but of two sequences
    rule.learn(9000.0, one, [2], [result])
    assert rule.chooser is before
    rule.learn(50.0, one, [3], [result])
    assert learnt(rule)[3] == pytest.approx(50.0)
    rule.learn(60.0, two, [1, 1], [result] * 2)
    assert 50.0 < learnt(rule)[3] < 60.0


def test_plain_decoding_teaches_nothing() -> None:
    rule = widths()
    before = rule.chooser
    for _ in range(3):
        rule.learn(50.0, [()], [0], [Result(0, 9, (), ())])
        rule.learn(50.0, [(), ()], [0, 0], [Result(0, 9, (), ())] * 2)
    assert rule.chooser is before


def test_confidences_meet_what_was_accepted_of_them() -> None:
    """Drafts up to the first rejected one among those verified; sequence by sequence."""
    rule = widths("adaptive", 12, 2)
    confidences = [(2.0, 1.0, 0.5, 0.0, -1.0), (-0.5, 3.0, 3.0, 3.0, 3.0)]
    results = [Result(1, 9, (1,) * B, (0.0,) * B), Result(2, 9, (1,) * B, (0.0,) * B)]
    for _ in range(2):
        rule.learn(50.0, confidences, [3, 2], results)
    _, accepted, drafts = rule.chooser.calibration.counts.sum(axis=2)
    assert drafts.tolist() == [2, 2, 0, 0, 0]  # of the first 2 of 3, of the second both
    assert accepted.tolist() == [2, 1, 0, 0, 0]


def test_the_rate_is_that_of_all_sequences() -> None:
    rule = widths("adaptive", 8, 2)
    results = [Result(2, 9, (1,) * B, (0.0,) * B), Result(0, 9, (1,) * B, (0.0,) * B)]
    for _ in range(200):
        rule.learn(20.0, [(1.0,) * B] * 2, [2, 1], results)
    assert rule.chooser.rate.per_ms == pytest.approx(4 / 20, rel=0.02)


@every_mode
def test_every_mode_learns_alike(mode: str) -> None:
    """So that comparisons of modes start from the same table."""
    rule, other = widths(mode), widths("adaptive")
    for each in (rule, other):
        taught(each, 4, 33.0, accepted=1)
    assert learnt(rule) == learnt(other)
    assert (rule.chooser.calibration.counts == other.chooser.calibration.counts).all()


# --- engines ---


@dataclass
class Watched:
    """Parts and results of an engine's decode steps, as they pass by."""

    plans: Plans
    steps: list[tuple[list[Part], list[Result]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.plans, name)

    def decode(self, parts: list[Part]) -> list[Result]:
        results = self.plans.decode(parts)
        self.steps.append((list(parts), results))
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
