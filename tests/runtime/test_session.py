"""A session's numbers: which rows come next, where EOS may not come, what counts."""

from __future__ import annotations

import pytest

from ultraflash.runtime.request import Generation
from ultraflash.runtime.session import Session

EOS, MAX_SEQ = 1, 64


def session(prompt: int = 20, max_tokens: int = 10, min_tokens: int = 0) -> Session:
    ids = tuple(range(100, 100 + prompt))
    request = Generation(ids, max_tokens, min_tokens=min_tokens)
    return Session.start("k", request, 3, EOS, MAX_SEQ)


def test_chunks_go_through_the_prompt() -> None:
    s = session()
    parts = []
    while s.waiting:
        parts.append(s.chunk(8))
        s.done += len(parts[-1].ids)
    assert [(p.slot, p.start, len(p.ids)) for p in parts] == [(3, 0, 8), (3, 8, 8), (3, 16, 4)]
    tail = s.tail(6)
    assert (tail.start, list(tail.ids)) == (14, list(range(114, 120)))


@pytest.mark.parametrize(("min_tokens", "banned"), [(0, 0), (1, 8), (5, 8)])
def test_a_prompt_bans_eos_behind_its_last_row(min_tokens: int, banned: int) -> None:
    """The token is drawn there, and nowhere else."""
    part = session(min_tokens=min_tokens).chunk(8)
    assert (part.banned, part.num_banned) == (EOS, banned)


def test_drafts_are_banned_from_ending_too_soon() -> None:
    s = session(min_tokens=4)
    s.done, s.drafts = 20, (7, 7, 7, 7, 7)
    s.emit([200, 201])
    s.done = 21
    part = s.verify(5)
    assert list(part.ids) == [201, 7, 7, 7, 7, 7]
    assert part.num_banned == 2  # behind rows 0 and 1 come tokens 3 and 4


def test_what_counts_when_a_stop_came_among_accepted_drafts() -> None:
    s = session()
    s.done = 20
    assert s.emit([5, 6]) == ((5, 6), None)
    s.done += 4  # the step verified 6, 8, EOS and 9, and kept all
    assert s.emit([8, EOS, 9, 10]) == ((8,), "stop")
    assert s.ids[20:] == [5, 6, 8]
    assert (s.done, s.known) == (24, 23)


def test_whether_the_next_step_is_like_this_one() -> None:
    """Not if EOS becomes possible, nor if the answer or the context may end with this one."""

    def goes_on(rows: int, **how: int) -> bool:
        s = session(**how)
        s.emit([200, 201])
        return s.goes_on(rows)

    assert goes_on(1)
    assert goes_on(1, max_tokens=4)
    assert not goes_on(1, max_tokens=3)
    assert goes_on(3, max_tokens=8)
    assert not goes_on(3, max_tokens=7)
    assert not goes_on(1, min_tokens=3)
    assert goes_on(1, min_tokens=2)


def test_the_last_token_of_a_cut_answer_was_never_processed() -> None:
    s = session(max_tokens=2)
    s.done = 20
    s.emit([5])
    s.done += 1
    assert s.emit([6]) == ((6,), "length")
    assert (s.known, len(s.ids)) == (21, 22)
