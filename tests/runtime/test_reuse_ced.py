"""Conversations that come back to an engine whose prefill skips the decoder (CED)."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.desk import some_ids
from helpers.points import ASSISTANT, EOS, USER
from helpers.reuse import BOS, EVERY, OFTEN, THINK_END, ask, open_engine, without_store
from ultraflash.runtime import Engine
from ultraflash.runtime import resume as rules
from ultraflash.runtime.resume import ALL_LAYERS, Kind, Run
from ultraflash.runtime.session import Session
from ultraflash.runtime.step_io import Part
from ultraflash.runtime.store import LocalStore

TAIL = 24


@pytest.fixture(scope="module", params=["ced20", "ced21"])
def ced(request: pytest.FixtureRequest, folder: Path, backend: str) -> Engine:
    return open_engine(folder, backend, prefill=request.param, tail=TAIL, max_sequences=1)


def test_ced_resumes_from_encoder_points(ced: Engine) -> None:
    """The encoder goes on where it was, the replay is the same: as if nothing had been stored."""
    ced.use_store(LocalStore(1 << 26))
    ids = some_ids(60, 150)
    ask(ced, ids)
    store = ced.store
    assert isinstance(store, LocalStore)
    kinds = {e.point.length: e.point.kind for e in store._entries.values()}
    assert kinds == {
        **dict.fromkeys([32, 64, 96, 128], Kind.ENCODER),
        155: Kind.FULL,  # the end of the answer
    }
    for n in (32, 64, 128):
        for suffix in (TAIL - 1, TAIL):
            branch = [*ids[: n + 2], *some_ids(n, suffix - 2)]
            answer = ask(ced, branch, 3)
            # Too short a suffix for a replay: from the point before.
            assert answer.cached == (n if suffix >= TAIL else n - EVERY)
            assert answer.said == without_store(ced, branch, 3).said


def test_ced_takes_a_full_point_before_the_header(
    ced: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail is a window and a header long, so a whole window ends before the header."""
    ced.use_store(LocalStore(1 << 26))
    ids = [BOS, USER, *some_ids(61, 70), ASSISTANT, THINK_END]
    first = ask(ced, ids, 1)
    assert first.said == without_store(ced, ids, 1).said
    header = len(ids) - 2
    store = ced.store
    assert isinstance(store, LocalStore)
    kinds = {e.point.length: e.point.kind for e in store._entries.values()}
    assert kinds[header] is Kind.FULL
    # Behind a full point a long suffix is run as CED: equal to CED of the whole prompt.
    monkeypatch.setattr(rules, "LONGEST_FULL", 39)
    follow = [*ids, *some_ids(62, 38)]
    answer = ask(ced, follow, 4)
    assert answer.cached == header
    assert answer.said == without_store(ced, follow, 4).said


def test_ced_runs_a_short_suffix_through_all_layers(
    ced: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a conversation that never stopped would: its state is that of going on row by row."""
    ced.use_store(LocalStore(1 << 26))
    ids = [BOS, USER, *some_ids(63, 50), ASSISTANT, THINK_END]
    suffix = [EOS, *some_ids(64, 17)]
    runs: list[Run] = []
    answer = ask(ced, ids, 30, stop_ids=OFTEN)
    assert answer.finish == "stop"
    start = len(ids) + len(answer.tokens)
    slot = ced._free[-1]  # it still holds the conversation that the engine has forgotten
    for at, token in enumerate(suffix, start):
        ced._plans.decode([Part(slot, at, [token])])
    length = start + len(suffix)
    want = ced._layout.export_point(ced._backend, slot, length, Kind.FULL)
    begin = ced._reuse.start

    def watched(session: Session) -> Run:
        runs.append(begin(session))
        return runs[-1]

    monkeypatch.setattr(ced._reuse, "start", watched)
    again = ask(ced, [*ids, *answer.tokens, *suffix], 1)
    assert runs == [ALL_LAYERS]
    assert again.cached == start
    store = ced.store
    assert isinstance(store, LocalStore)
    (point,) = [e.point for e in store._entries.values() if e.point.length == length]
    assert point.data == want
