"""Requests in, tokens out: order, company, cancelling, ends, refusals, seeds, and what may leak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.rig import TINY, Rig
from ultraflash.runtime import (
    ConfigError,
    Engine,
    Generation,
    RequestError,
    RuntimeConfig,
    Sampling,
    Step,
)

GREEDY = Sampling(temperature=0)
MAX_SEQ, SEQUENCES = 96, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


def open_engine(folder: Path, **settings: object) -> Engine:
    config = RuntimeConfig(
        TINY, max_sequences=SEQUENCES, max_seq=MAX_SEQ, prefill_chunks=(4, 16), cache_dir=folder
    )
    return Engine.open(replace(config, **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Engine:
    return open_engine(folder)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The module's engine, idle before and after."""
    assert not shared.has_work
    yield shared
    shared.close()
    assert_no_slot_is_lost(shared)


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


def run(engine: Engine, **requests: Generation) -> dict[str, tuple[list[int], str | None]]:
    """Submit all at once; tokens and the reason to finish, by key."""
    for key, request in requests.items():
        engine.submit(key, request)
    return collected(drain(engine))


def collected(steps: list[Step]) -> dict[str, tuple[list[int], str | None]]:
    found: dict[str, tuple[list[int], str | None]] = {}
    for step in steps:
        tokens, finish = found.setdefault(step.key, ([], None))
        assert finish is None, f"{step.key} goes on after it finished"
        found[step.key] = ([*tokens, *step.tokens], step.finish)
    return found


def alone(engine: Engine, request: Generation) -> tuple[list[int], str | None]:
    return run(engine, alone=request)["alone"]


def assert_no_slot_is_lost(engine: Engine) -> None:
    # No door of the engine tells slots, and a lost one only shows when all are needed.
    held = [session.slot for session in engine._live()]
    assert sorted(chain(engine._free, held)) == list(range(SEQUENCES + 1))


# --- what comes out ---


def test_greedy_tokens_are_the_largest_logits(engine: Engine) -> None:
    """Against one call over prompt and answer: nothing of the engine but its plan's operations."""
    request = greedy(1, 21, 30, ignore_eos=True)
    tokens, finish = alone(engine, request)
    logits = Rig().extend(0, 0, [*request.ids, *tokens[:-1]])[len(request.ids) - 1 :]
    logits[:, engine.model.eos] = -np.inf
    assert tokens == logits.argmax(axis=1).tolist()
    assert finish == "length"


def test_a_step_tells_where_the_request_stands(engine: Engine) -> None:
    request = greedy(2, 37, 3)  # prefilled as 16 + 16 + 16, the last one padded
    engine.submit("a", request)
    assert engine.step() == []
    assert engine.step() == []
    (first,) = engine.step()
    assert (first.key, first.prompt_tokens, first.cached_tokens) == ("a", 37, 0)
    assert len(first.tokens) == 1
    assert first.finish is None
    assert first.prefill_ms > 0
    assert first.decode_ms == 0
    (second,) = engine.step()
    assert second.decode_ms > 0
    assert second.prefill_ms == first.prefill_ms
    (last,) = engine.step()
    assert (len(last.tokens), last.finish, engine.has_work) == (1, "length", False)


def test_opening_loads_everything_and_runs_a_step(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = RuntimeConfig(TINY, max_seq=32, cache_dir=folder)
    engine = Engine.open(config, progress=lambda done, total: seen.append((done, total)))
    done, totals = [d for d, _ in seen], {t for _, t in seen}
    assert done == sorted(done)
    assert totals == {done[-1]}
    assert engine.max_seq == 32
    assert not engine.has_work


def test_context_defaults_to_the_checkpoint(folder: Path) -> None:
    engine = open_engine(folder, max_seq=None)
    assert engine.max_seq == engine.model.max_position == 256


# --- order and company ---


def test_requests_are_served_in_the_order_they_came(engine: Engine) -> None:
    keys = [f"r{n}" for n in range(7)]
    for n, key in enumerate(keys):
        engine.submit(key, greedy(n, 3 + 9 * (n % 3), 5, ignore_eos=True))
    firsts = list(dict.fromkeys(step.key for step in drain(engine)))
    assert firsts == keys


def test_running_requests_go_on_while_another_prefills(engine: Engine) -> None:
    engine.submit("a", greedy(1, 3, 30, ignore_eos=True))
    engine.step()
    engine.submit("b", greedy(2, 60, 2, ignore_eos=True))
    keys = [[step.key for step in engine.step()] for _ in range(4)]  # 60 = 16 + 16 + 16 + 12
    assert keys == [["a"], ["a"], ["a"], ["a", "b"]]


def test_no_more_run_at_once_than_were_asked_for(engine: Engine) -> None:
    """One more may be prefilled meanwhile; it has its first token, then waits for a place."""
    for n in range(5):
        engine.submit(f"r{n}", greedy(n, 3, 12, ignore_eos=True))
    widths = []
    while engine.has_work:
        widths.append(sum(step.decode_ms > 0 for step in engine.step()))
        assert len(engine._live()) <= SEQUENCES + 1
    assert max(widths) == SEQUENCES


@pytest.mark.parametrize("make", [greedy, seeded], ids=["greedy", "seeded"])
def test_company_changes_nothing(engine: Engine, make: Callable[..., Generation]) -> None:
    """More than have places at once, of all lengths, and one that joins in the middle."""
    requests = {
        f"r{n}": make(n, length, 6 + n) for n, length in enumerate((1, 5, 16, 17, 33, 50, 70))
    }
    want = {key: alone(engine, request) for key, request in requests.items()}
    late = requests.pop("r3")
    for key, request in requests.items():
        engine.submit(key, request)
    steps = [step for _ in range(6) for step in engine.step()]
    engine.submit("r3", late)
    assert collected(steps + drain(engine)) == want


def test_chunks_of_a_prompt_change_nothing(engine: Engine, folder: Path) -> None:
    for request in (greedy(1, 61), seeded(2, 45)):
        want = alone(engine, request)
        for chunks in ((1,), (7,), (64,), (3, 50)):
            assert alone(open_engine(folder, prefill_chunks=chunks), request) == want, chunks


# --- cancelling ---


def test_cancel_where_it_waits(engine: Engine) -> None:
    engine.submit("a", greedy(1, 4))
    engine.submit("b", greedy(2, 4))
    engine.cancel("b")
    assert set(collected(drain(engine))) == {"a"}


def test_cancel_while_it_prefills(engine: Engine) -> None:
    engine.submit("a", greedy(1, 50))
    assert engine.step() == []
    engine.cancel("a")
    assert not engine.has_work
    assert_no_slot_is_lost(engine)
    assert engine.step() == []


def test_cancel_while_it_waits_for_a_place(engine: Engine) -> None:
    for n in range(SEQUENCES + 1):
        engine.submit(f"r{n}", greedy(n, 3, 20, ignore_eos=True))
    while len(engine._ready) == 0 or len(engine._running) < SEQUENCES:
        engine.step()
    (waiting,) = engine._ready
    engine.cancel(waiting.key)
    assert_no_slot_is_lost(engine)
    assert waiting.key not in {step.key for step in drain(engine)}


def test_cancel_while_it_runs(engine: Engine) -> None:
    want = alone(engine, greedy(2, 9, 12, ignore_eos=True))
    engine.submit("a", greedy(1, 4, 30, ignore_eos=True))
    engine.submit("b", greedy(2, 9, 12, ignore_eos=True))
    steps = [step for _ in range(4) for step in engine.step()]
    engine.cancel("a")
    assert_no_slot_is_lost(engine)
    rest = drain(engine)
    assert {step.key for step in rest} == {"b"}
    assert collected(steps + rest)["b"] == want


def test_cancel_of_nobody_and_of_the_finished(engine: Engine) -> None:
    engine.cancel("nobody")
    alone(engine, greedy(1, 4))
    engine.cancel("alone")
    assert_no_slot_is_lost(engine)


def test_close_forgets_everything(engine: Engine) -> None:
    for n in range(6):
        engine.submit(f"r{n}", greedy(n, 20, 20, ignore_eos=True))
    for _ in range(7):
        engine.step()
    engine.close()
    assert not engine.has_work
    assert engine.step() == []
    assert_no_slot_is_lost(engine)
    assert alone(engine, greedy(1, 4))[0]  # and is as good as new


# --- how answers end ---


@pytest.mark.parametrize("count", [1, 2, 9])
def test_max_tokens(engine: Engine, count: int) -> None:
    tokens, finish = alone(engine, greedy(1, 9, count, ignore_eos=True))
    assert (len(tokens), finish) == (count, "length")


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_context_ends_an_answer(engine: Engine, room: int) -> None:
    request = greedy(3, MAX_SEQ - room, 50, ignore_eos=True)
    tokens, finish = alone(engine, request)
    assert (len(tokens), finish) == (room, "length")
    longer = greedy(3, MAX_SEQ - room - 1, 50, ignore_eos=True)
    assert len(alone(engine, longer)[0]) == room + 1


def different_tokens(engine: Engine, count: int) -> tuple[Generation, list[int]]:
    """A greedy request whose first `count` tokens are all different, and these."""
    for number in range(50):
        request = greedy(number, 12, count, ignore_eos=True)
        tokens, _ = alone(engine, request)
        if len(set(tokens)) == count:
            return request, tokens
    raise AssertionError("no such prompt among fifty")


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_stop_id_ends_the_answer_and_is_not_in_it(engine: Engine, place: int) -> None:
    request, tokens = different_tokens(engine, 6)
    stopped = replace(request, stop_ids=frozenset({tokens[place], 511}))
    assert alone(engine, stopped) == (tokens[:place], "stop")


def test_a_stop_id_beside_the_last_token(engine: Engine) -> None:
    """The last token allowed is a stop id: nothing is missing, so it counts as stopped."""
    request, tokens = different_tokens(engine, 6)
    stopped = replace(request, stop_ids=frozenset({tokens[5]}))
    assert alone(engine, stopped) == (tokens[:5], "stop")


@pytest.fixture
def eos(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Generation, list[int]]:
    """A request whose third greedy token is EOS, and what it would say without an end."""
    request, tokens = different_tokens(engine, 6)
    monkeypatch.setattr(engine, "model", replace(engine.model, eos=tokens[2]))
    return replace(request, ignore_eos=False, max_tokens=12), tokens


def test_eos_ends_the_answer_and_is_not_in_it(
    engine: Engine, eos: tuple[Generation, list[int]]
) -> None:
    request, tokens = eos
    assert alone(engine, request) == (tokens[:2], "stop")


def test_other_stop_ids_do_not_let_eos_through(
    engine: Engine, eos: tuple[Generation, list[int]]
) -> None:
    request, tokens = eos
    assert alone(engine, replace(request, stop_ids=frozenset({511}))) == (tokens[:2], "stop")
    assert alone(engine, replace(request, stop_ids=frozenset())) == (tokens[:2], "stop")
    early = replace(request, stop_ids=frozenset({tokens[1]}))
    assert alone(engine, early) == (tokens[:1], "stop")


@pytest.mark.parametrize("least", [0, 1, 2, 3, 7, 12, 40])
def test_min_tokens_keeps_eos_away(
    engine: Engine, eos: tuple[Generation, list[int]], least: int
) -> None:
    request, tokens = eos
    answer, finish = alone(engine, replace(request, min_tokens=least))
    assert len(answer) >= min(least, 12)
    assert answer[:2] == tokens[:2]
    assert engine.model.eos not in answer
    assert finish == ("stop" if len(answer) < 12 else "length")
    if least <= 2:
        assert len(answer) == 2


def test_ignore_eos_goes_on(engine: Engine, eos: tuple[Generation, list[int]]) -> None:
    request, tokens = eos
    answer, finish = alone(engine, replace(request, ignore_eos=True))
    assert (len(answer), finish) == (12, "length")
    assert answer[:2] == tokens[:2]
    assert engine.model.eos not in answer


def test_ignore_eos_leaves_other_stop_ids(
    engine: Engine, eos: tuple[Generation, list[int]]
) -> None:
    request, tokens = eos
    request = replace(request, ignore_eos=True, stop_ids=frozenset({tokens[1]}))
    assert alone(engine, request) == (tokens[:1], "stop")


def test_many_stop_ids_are_never_emitted(engine: Engine) -> None:
    stops = frozenset(range(0, 512, 7))
    finished = set()
    for number in range(12):
        tokens, finish = alone(engine, replace(seeded(number, 5, 25), stop_ids=stops))
        assert not stops & set(tokens)
        finished.add(finish)
    assert "stop" in finished


# --- what is refused ---

REFUSED = {
    "empty prompt": ("ids", {"ids": ()}, ["empty", "at least one"]),
    "prompt as long as the context": (
        "ids",
        {"ids": (5,) * MAX_SEQ},
        [f"{MAX_SEQ} tokens", f"shorten it to {MAX_SEQ - 1}"],
    ),
    "negative id": ("ids", {"ids": (5, -1)}, ["-1", "0 to 511"]),
    "id beyond the vocabulary": ("ids", {"ids": (5, 512)}, ["512", "0 to 511"]),
    "no token wanted": ("max_tokens", {"max_tokens": 0}, ["at least 1", "got 0"]),
    "negative max_tokens": ("max_tokens", {"max_tokens": -3}, ["at least 1", "got -3"]),
    "negative temperature": ("temperature", {"temperature": -0.5}, ["at least 0", "-0.5"]),
    "temperature beyond fp32": ("temperature", {"temperature": 1e39}, ["1e+39"]),
    "infinite temperature": ("temperature", {"temperature": float("inf")}, ["inf"]),
    "temperature that is no number": ("temperature", {"temperature": float("nan")}, ["nan"]),
    "top_p of nothing": ("top_p", {"top_p": 0.0}, ["above 0", "got 0.0"]),
    "top_p above one": ("top_p", {"top_p": 1.5}, ["at most 1", "got 1.5"]),
    "top_p that is no number": ("top_p", {"top_p": float("nan")}, ["nan"]),
    "negative top_k": ("top_k", {"top_k": -1}, ["0 (off) to", "got -1"]),
    "top_k of more than 32 bits": ("top_k", {"top_k": 2**31}, ["0 (off) to", str(2**31)]),
    "negative seed": ("seed", {"seed": -1}, ["0 to", "got -1"]),
    "seed of more than 64 bits": ("seed", {"seed": 2**64}, ["0 to", str(2**64)]),
}


@pytest.mark.parametrize(("field", "change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_can_never_run_is_refused_in_one_sentence(
    engine: Engine, field: str, change: dict[str, object], words: list[str]
) -> None:
    known = {f: v for f, v in change.items() if f in ("ids", "max_tokens")}
    sampling = replace(Sampling(), **{f: v for f, v in change.items() if f not in known})  # type: ignore[arg-type]
    request = replace(greedy(1, 4), sampling=sampling, **known)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        engine.submit("bad", request)
    assert caught.value.field == field
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert not engine.has_work


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-30, seed=0),
        Sampling(temperature=1e30, seed=2**64 - 1),
        Sampling(top_p=1e-30, seed=2**63),
        Sampling(top_k=1, seed=5),
        Sampling(top_k=2**31 - 1, seed=5),
        Sampling(temperature=2, top_p=0.5, top_k=3, seed=9),
    ],
    ids=str,
)
def test_extreme_sampling_is_served(engine: Engine, sampling: Sampling) -> None:
    request = replace(greedy(4, 9, 5), sampling=sampling, ignore_eos=True)
    tokens, _ = alone(engine, request)
    assert len(tokens) == 5
    if sampling.top_k == 1 or sampling.temperature < 1e-9 or sampling.top_p < 1e-9:
        assert tokens == alone(engine, replace(request, sampling=GREEDY))[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_sequences": 17}, ["17", "16"]),
        ({"max_seq": 1}, ["1", "at least 2"]),
        ({"max_seq": 257}, ["257", "256"]),
    ],
    ids=["sequences", "no room for an answer", "beyond the model"],
)
def test_settings_that_cannot_work_are_refused(
    folder: Path, settings: dict[str, int], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine(folder, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_the_smallest_context(folder: Path) -> None:
    engine = open_engine(folder, max_seq=2)
    assert alone(engine, greedy(1, 1, 9, ignore_eos=True))[1] == "length"
    with pytest.raises(RequestError, match="shorten it to 1"):
        engine.submit("bad", greedy(1, 2))


# --- chance ---


def test_a_seed_repeats(engine: Engine, folder: Path) -> None:
    """On the same engine, after other work, in another slot, and on another engine."""
    request = seeded(5, 14, 20, ignore_eos=True)
    want = alone(engine, request)
    assert alone(engine, request) == want
    assert run(engine, x=greedy(1, 3), y=seeded(2, 30), z=request)["z"] == want
    assert alone(open_engine(folder), request) == want


def test_another_seed_differs(engine: Engine) -> None:
    sampling = [Sampling(temperature=2, seed=seed) for seed in range(8)]
    answers = [
        tuple(alone(engine, replace(greedy(1, 5, 12, ignore_eos=True), sampling=s))[0])
        for s in sampling
    ]
    assert len(set(answers)) == len(answers)


def test_no_seed_differs_from_time_to_time(engine: Engine) -> None:
    request = Generation(prompt(1, 5), 12, Sampling(temperature=2), ignore_eos=True)
    answers = {tuple(alone(engine, request)[0]) for _ in range(4)}
    assert len(answers) == 4


def test_twins_without_a_seed_differ(engine: Engine) -> None:
    request = Generation(prompt(1, 5), 12, Sampling(temperature=2), ignore_eos=True)
    answers = run(engine, a=request, b=request)
    assert answers["a"] != answers["b"]


# --- nothing leaks, whatever happens ---

POOL = [
    *(greedy(n, length, 1 + n, ignore_eos=n % 2 == 0) for n, length in enumerate((1, 4, 17, 40))),
    *(seeded(n, length, 2 + n) for n, length in enumerate((2, 16, 33, 60))),
    replace(seeded(9, 20, 9), stop_ids=frozenset(range(0, 512, 3))),
    greedy(10, MAX_SEQ - 2, 9),
]
_engines: list[Engine] = []
_answers: dict[int, tuple[list[int], str | None]] = {}


class AnyOrder(RuleBasedStateMachine):
    """Submit, cancel and step in any order: answers as of a request alone, and slots come back."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = _engines[0]
        self.engine.close()
        self.live: dict[str, int] = {}  # key -> number in the pool, in order of submission
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    def answer(self, number: int) -> tuple[list[int], str | None]:
        if number not in _answers:
            _answers[number] = alone(_engines[1], POOL[number])
        return _answers[number]

    @rule(number=st.integers(0, len(POOL) - 1))
    def submit(self, number: int) -> None:
        if len(self.live) >= 7:
            return
        key = f"{self.count}"
        self.count += 1
        self.engine.submit(key, POOL[number])
        self.live[key], self.tokens[key] = number, []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.cancel(key)
        del self.live[key]

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.take(self.engine.step())

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            tokens, finish = self.answer(self.live[step.key])
            got = self.tokens[step.key]
            if not got:  # whoever came before has begun as well
                earlier = list(self.live)[: list(self.live).index(step.key)]
                assert all(self.tokens[key] for key in earlier)
            got += step.tokens
            assert got == tokens[: len(got)]
            if step.finish:
                assert (got, step.finish) == (tokens, finish)
                del self.live[step.key]

    @invariant()
    def slots_come_back(self) -> None:
        assert_no_slot_is_lost(self.engine)
        assert self.engine.has_work == bool(self.live)

    def teardown(self) -> None:
        for _ in range(300):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.live
        assert len(self.engine._free) == SEQUENCES + 1


def test_any_order_of_events(engine: Engine, folder: Path) -> None:
    _engines[:] = [open_engine(folder), engine]
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=8,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    _engines.clear()
