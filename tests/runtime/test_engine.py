"""Requests in, tokens out: the tokens, their order, company, cancelling, chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.engines import (
    SEQUENCES,
    alone,
    assert_no_slot_is_lost,
    collected,
    drain,
    greedy,
    open_engine,
    prompt,
    run,
    seeded,
)
from helpers.rig import TINY, Rig
from ultraflash.runtime import (
    Engine,
    Generation,
    RuntimeConfig,
    Sampling,
    Step,
)

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
    request = greedy(2, 37, 3)  # prefilled in chunks of 16, the last one padded
    engine.submit("a", request)
    steps: list[Step] = []
    while not steps:
        steps = engine.step()
    (first,) = steps
    assert (first.key, first.prompt_tokens, first.cached_tokens) == ("a", 37, 0)
    assert len(first.tokens) == 1
    assert first.finish is None
    assert first.prefill_ms > 0
    assert first.decode_ms == 0
    (second,) = engine.step()
    assert second.decode_ms > 0
    assert second.prefill_ms == first.prefill_ms
    last = second if second.finish else engine.step()[0]
    assert (last.finish, engine.has_work) == ("length", False)


def test_opening_loads_everything_and_runs_a_step(engine_cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = RuntimeConfig(TINY, max_seq=32, cache_dir=engine_cache)
    engine = Engine.open(config, progress=lambda done, total: seen.append((done, total)))
    done, totals = [d for d, _ in seen], {t for _, t in seen}
    assert done == sorted(done)
    assert totals == {done[-1]}
    assert engine.max_seq == 32
    assert not engine.has_work


def test_context_defaults_to_the_checkpoint(engine_cache: Path) -> None:
    engine = open_engine(engine_cache, max_seq=None)
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


def test_chunks_of_a_prompt_change_nothing(engine: Engine, engine_cache: Path) -> None:
    for request in (greedy(1, 61), seeded(2, 45)):
        want = alone(engine, request)
        for chunks in ((1,), (7,), (3, 50)):
            assert alone(open_engine(engine_cache, prefill_chunks=chunks), request) == want, chunks


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


# --- chance ---


def test_a_seed_repeats(engine: Engine, engine_cache: Path) -> None:
    """On the same engine, after other work, in another slot, and on another engine."""
    request = seeded(5, 14, 20, ignore_eos=True)
    want = alone(engine, request)
    assert alone(engine, request) == want
    assert run(engine, x=greedy(1, 3), y=seeded(2, 30), z=request)["z"] == want
    assert alone(open_engine(engine_cache), request) == want


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
