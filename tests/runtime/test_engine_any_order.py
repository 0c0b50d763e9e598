"""Whatever is submitted, cancelled and stepped: answers hold and no slot is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.engines import (
    MAX_SEQ,
    SEQUENCES,
    Answer,
    alone,
    assert_no_slot_is_lost,
    greedy,
    open_engine,
    seeded,
)
from ultraflash.runtime import Engine, Step

POOL = [
    *(greedy(n, length, 1 + n, ignore_eos=n % 2 == 0) for n, length in enumerate((1, 4, 17, 40))),
    *(seeded(n, length, 2 + n) for n, length in enumerate((2, 16, 33, 60))),
    replace(seeded(9, 20, 9), stop_ids=frozenset(range(0, 512, 3))),
    greedy(10, MAX_SEQ - 2, 9),
]
_engines: list[Engine] = []
_answers: dict[int, Answer] = {}


class AnyOrder(RuleBasedStateMachine):
    """Submit, cancel and step in any order: answers as of a request alone, and slots come back."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = _engines[0]
        self.engine.close()
        self.live: dict[str, int] = {}  # key -> number in the pool, in order of submission
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    def answer(self, number: int) -> Answer:
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


def test_any_order_of_events(engine: Engine, engine_cache: Path) -> None:
    _engines[:] = [open_engine(engine_cache), engine]
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
