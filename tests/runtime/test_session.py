"""A session's numbers: which rows come next, where EOS may not come, what counts."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_a_prompt_bans_eos_behind_its_last_row(min_tokens: int) -> None:
    """A token is drawn there, and nowhere else; the ban is the same for all that comes."""
    s = session(min_tokens=min_tokens)
    assert (s.chunk(8).banned, s.chunk(8).ban_end) == (EOS, 19 + min_tokens)
    s.done, s.drafts = 20, (7,)
    s.emit([200])
    assert (s.verify().banned, s.verify().ban_end) == (EOS, 19 + min_tokens)


def test_a_ban_never_ends_where_eos_is_ignored() -> None:
    s = session()
    s.request = replace(s.request, ignore_eos=True)
    assert s.chunk(8).ban_end == MAX_SEQ


def test_drafts_are_banned_from_ending_too_soon() -> None:
    s = session(min_tokens=4)
    s.done, s.drafts = 20, (7, 7, 7, 7, 7)
    s.emit([200, 201])
    s.done = 21
    part = s.verify()
    assert list(part.ids) == [201, 7, 7, 7, 7, 7]
    assert part.ban_end - part.start == 2  # behind rows 0 and 1 come tokens 3 and 4


def test_what_counts_when_a_stop_came_among_accepted_drafts() -> None:
    s = session()
    s.done = 20
    assert s.emit([5, 6]) == ((5, 6), None)
    s.done += 4  # the step verified 6, 8, EOS and 9, and kept all
    assert s.emit([8, EOS, 9, 10]) == ((8,), "stop")
    assert s.ids[20:] == [5, 6, 8]
    assert (s.done, s.known) == (24, 23)


def test_whether_another_step_comes_behind_the_next_one() -> None:
    """Not where the answer or the context may end with that one."""

    def goes_on(drafts: int, **how: int) -> bool:
        s = session(**how)
        s.drafts = (7,) * drafts
        s.emit([200, 201])
        return s.goes_on

    assert goes_on(0, max_tokens=4)
    assert not goes_on(0, max_tokens=3)
    assert goes_on(5, max_tokens=9)
    assert not goes_on(5, max_tokens=8)  # it may give six tokens
    assert goes_on(5, prompt=55, max_tokens=99)
    assert not goes_on(5, prompt=56, max_tokens=99)


def test_the_last_token_of_a_cut_answer_was_never_processed() -> None:
    s = session(max_tokens=2)
    s.done = 20
    s.emit([5])
    s.done += 1
    assert s.emit([6]) == ((6,), "length")
    assert (s.known, len(s.ids)) == (21, 22)
