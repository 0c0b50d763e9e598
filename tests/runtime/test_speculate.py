"""How many drafts an engine verifies (runtime/speculate.py): what sessions bring to the width rule,
which test_width.py looks at, and what steps teach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ultraflash.graphs.width import KNOTS
from ultraflash.runtime import ConfigError, Generation, Sampling
from ultraflash.runtime.plans import Result
from ultraflash.runtime.profiles import select_profile
from ultraflash.runtime.session import Session
from ultraflash.runtime.speculate import Widths
from ultraflash.runtime.width import LESSONS

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


def choose(rule: Widths, sessions: Sequence[Session]) -> tuple[int, ...]:
    """Drafts of each session that the next step verifies."""
    confidence = np.array([s.confidence or (0.0,) * B for s in sessions], np.float32)
    limits = np.array([s.room for s in sessions], np.int32)
    numbers = rule.rule(sessions)
    return tuple(numbers.kept(confidence, limits, len(numbers.price)).tolist())


def teach(rule: Widths, ms: float, *step: Any) -> None:
    rule.hear(ms, *step)
    rule.learn()


def taught(rule: Widths, rows: int, ms: float, accepted: int = 0, steps: int = 40) -> None:
    """Steps of one sequence: so many rows, so long, so many drafts accepted."""
    for _ in range(steps + 1):  # the first one does not count
        result = Result(accepted, 9, (1,) * B, (0.0,) * B)
        teach(rule, ms, [(1.0,) * B], [rows - 1], [result])


@every_mode
def test_all_modes_give_each_session_a_number(mode: str) -> None:
    rule = widths(mode)
    for sessions in ([session()], [session(), seeded()], [seeded(), seeded()]):
        kept = choose(rule, sessions)
        assert len(kept) == len(sessions)
        assert all(0 <= n <= s.room for n, s in zip(kept, sessions, strict=True))
        assert len(kept) + sum(kept) <= 8


@every_mode
@pytest.mark.parametrize("room", range(B + 1))
def test_nobody_verifies_what_could_not_become_a_token(mode: str, room: int) -> None:
    for make in (session, seeded):
        assert choose(widths(mode), [make(SURE, room)])[0] <= room
    assert choose(widths("all"), [session(HOPELESS, room)]) == (room,)


@every_mode
def test_sessions_without_drafts_decode_plainly(mode: str) -> None:
    """A server that does not draft: there are no confidences either."""
    bare = session(room=0)
    bare.drafts = bare.confidence = ()
    assert choose(widths(mode), [bare, bare]) == (0, 0)


def test_all_deals_the_rows_that_there_are_one_by_one() -> None:
    """Whatever the confidences say and whatever was learnt."""
    rule = widths("all", 8, 3)
    assert choose(rule, [session(HOPELESS)]) == (5,)
    assert choose(rule, [session(), session(HOPELESS)]) == (3, 3)
    assert choose(rule, [session()] * 3) == (2, 2, 1)
    assert choose(rule, [session(room=1), session(), session(room=0)]) == (1, 4, 0)
    assert choose(rule, [session(room=2), session(room=2), session(room=1)]) == (2, 2, 1)
    assert choose(widths("all", 4, 4), [session()] * 4) == (0, 0, 0, 0)
    taught(rule, 3, 500.0)
    assert choose(rule, [session(HOPELESS)]) == (5,)


THRESHOLDS = select_profile("cpu", 1, B).thresholds


def fixed_width(confidence: Sequence[float]) -> int:
    """The profile's rule in plain Python."""
    survival, kept = 1.0, 0
    for c, threshold in zip(confidence, THRESHOLDS, strict=True):
        survival *= np.interp(c, KNOTS, 1 / (1 + np.exp(-KNOTS)))
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
            assert choose(rule, [make(confidence)]) == (want,)
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
        (want,) = choose(fresh, [mine])
        assert want <= 8 // 2 - 1  # its share of the widest step
        for other in (session(SURE), seeded(SURE), session(HOPELESS), session(room=0)):
            assert choose(old, [mine, other])[0] == want
            assert choose(old, [other, mine])[1] == want


@pytest.mark.parametrize("how", [{"seed": 3}, {"temperature": 1.0}, {}], ids=str)
def test_only_seeded_chance_has_to_repeat(how: dict[str, Any]) -> None:
    """Greedy answers are the same at any width; without a seed nothing is promised."""
    rule = widths("adaptive", 8, 1)
    for rows in range(6, 0, -1):
        taught(rule, rows, 1000.0 * rows if rows > 1 else 10.0)
    assert choose(rule, [session(2.0, **how)]) == (0,)
    assert choose(rule, [seeded(2.0)])[0] > 0


def test_adaptive_shares_by_survival() -> None:
    """Rows cost nothing here, so that all are given away: the likelier drafts get them."""
    rule = widths("adaptive", 8, 2)
    for rows in range(1, 9):
        taught(rule, rows, 10.0)
    sure, unsure = session(3.0), session(-1.0)
    assert choose(rule, [sure, unsure]) == (5, 1)
    assert choose(rule, [unsure, sure]) == (1, 5)
    assert choose(rule, [sure, unsure, seeded(SURE)])[2] == 3  # reserved, whatever is left


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
    teach(rule, 9000.0, one, [3], [result])
    teach(rule, 9000.0, two, [1, 1], [result] * 2)  # four rows as well, but of two sequences
    teach(rule, 9000.0, one, [2], [result])
    assert rule.chooser is before
    teach(rule, 50.0, one, [3], [result])
    assert learnt(rule)[3] == pytest.approx(50.0)
    teach(rule, 60.0, two, [1, 1], [result] * 2)
    assert 50.0 < learnt(rule)[3] < 60.0


def test_plain_decoding_teaches_nothing() -> None:
    rule = widths()
    before = rule.chooser
    for _ in range(3):
        teach(rule, 50.0, [()], [0], [Result(0, 9, (), ())])
        teach(rule, 50.0, [(), ()], [0, 0], [Result(0, 9, (), ())] * 2)
    assert rule.chooser is before


def test_confidences_meet_what_was_accepted_of_them() -> None:
    """Drafts up to the first rejected one among those verified; sequence by sequence."""
    rule = widths("adaptive", 12, 2)
    confidences = [(2.0, 1.0, 0.5, 0.0, -1.0), (-0.5, 3.0, 3.0, 3.0, 3.0)]
    results = [Result(1, 9, (1,) * B, (0.0,) * B), Result(2, 9, (1,) * B, (0.0,) * B)]
    teach(rule, 50.0, confidences, [3, 2], results)  # compiles: teaches nothing
    for _ in range(LESSONS):
        assert not rule.chooser.calibration.counts.any()
        teach(rule, 50.0, confidences, [3, 2], results)
    _, accepted, drafts = rule.chooser.calibration.counts.sum(axis=2) / LESSONS
    assert drafts.tolist() == [2, 2, 0, 0, 0]  # of the first 2 of 3, of the second both
    assert accepted.tolist() == [2, 1, 0, 0, 0]


def test_the_rate_is_that_of_all_sequences() -> None:
    rule = widths("adaptive", 8, 2)
    results = [Result(2, 9, (1,) * B, (0.0,) * B), Result(0, 9, (1,) * B, (0.0,) * B)]
    for _ in range(200):
        teach(rule, 20.0, [(1.0,) * B] * 2, [2, 1], results)
    assert rule.chooser.rate.per_ms == pytest.approx(4 / 20, rel=0.02)


@every_mode
def test_every_mode_learns_alike(mode: str) -> None:
    """So that comparisons of modes start from the same table."""
    rule, other = widths(mode), widths("adaptive")
    for each in (rule, other):
        taught(each, 4, 33.0, accepted=1)
    assert learnt(rule) == learnt(other)
    assert (rule.chooser.calibration.counts == other.chooser.calibration.counts).all()
