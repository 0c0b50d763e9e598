"""Deaths of processes and ends of the server, with real processes and a fake engine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import CRASH, SILENT
from helpers.live_server import LiveServer, eventually, in_thread
from ultraflash.server.status import read_status

Start = Callable[..., LiveServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LiveServer] = []

    def start(**settings: Any) -> LiveServer:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(LiveServer(folder, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def server(start: Start) -> LiveServer:
    server = start(keep_alive_s=0.1)
    server.wait_ready()
    return server


def test_a_killed_engine_ends_streams_with_an_error_and_comes_back(server: LiveServer) -> None:
    with server.stream(max_tokens=90_000) as one, server.stream(seed=SILENT) as two:
        one_events, two_events = one.events(), two.events()
        next(one_events)
        killed = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        lasts = [list(one_events)[-1], list(two_events)[-1]]
        assert time.monotonic() - killed < 1.0
    for last in lasts:
        assert last["error"]["code"] == "engine_lost"
        assert "send it again" in last["error"]["message"]
    reasons = wait_ready_again(server)
    assert all(status in ("starting", "restarting") for status, _ in reasons)
    assert all("ended" in reason for _, reason in reasons)
    assert any("killed by signal 9 (SIGKILL)" in reason for _, reason in reasons)
    assert server.chat(max_tokens=2).status == 200


def wait_ready_again(server: LiveServer) -> list[tuple[str, str]]:
    """What /readyz said on the way."""
    said: list[tuple[str, str]] = []

    def ready() -> bool:
        reply = server.get("/readyz")
        if reply.status == 200:
            return True
        assert reply.status == 503
        assert reply.headers["Retry-After"]
        said.append((reply.json["status"], reply.json["reason"]))
        return False

    eventually(ready)
    return said


def test_an_engine_that_fails_leaves_its_last_words(server: LiveServer) -> None:
    reply = server.chat(seed=CRASH)
    assert (reply.status, reply.error["code"]) == (503, "engine_lost")
    reasons = wait_ready_again(server)
    assert any("exit status 1: RuntimeError: the device fell" in reason for _, reason in reasons)
    assert "Traceback" not in reply.body.decode()


def test_requests_are_refused_with_the_reason_while_there_is_no_engine(server: LiveServer) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)
    reply = eventually(lambda: (r := server.chat(max_tokens=1)).status == 503 and r)
    assert reply.error["code"] in ("not_ready", "engine_lost")
    assert reply.headers["Retry-After"] == "2"
    assert server.get("/healthz").status == 200


def test_a_killed_master_leaves_no_process(server: LiveServer) -> None:
    assert len(server.children()) == 3, "worker, supervisor, engine"
    with server.stream(max_tokens=90_000) as stream:
        next(stream.events())
        server.process.kill()
        server.process.wait()
        eventually(lambda: not server.children())


def test_a_killed_supervisor_stops_the_server(server: LiveServer) -> None:
    status = read_status(server.config.status_path)
    assert status is not None
    os.kill(status.supervisor, signal.SIGKILL)
    assert server.process.wait(30) == 70
    assert "the supervisor has ended" in server.log
    assert not server.children()
    assert not server.config.status_path.parent.exists()


def test_a_killed_http_worker_is_replaced_and_its_requests_cancelled(server: LiveServer) -> None:
    with server.stream(seed=SILENT):
        what, key = server.event()
        assert what == "submit"
        master = server.process.pid
        children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        status = read_status(server.config.status_path)
        assert status is not None
        (worker,) = {int(pid) for pid in children} - {status.supervisor}
        os.kill(worker, signal.SIGKILL)
        assert server.event() == ("cancel", key)
    eventually(lambda: answers(server))
    server.wait_ready()
    assert server.chat(max_tokens=1).status == 200


def answers(server: LiveServer) -> bool:
    try:
        return server.get("/healthz").status == 200
    except OSError:
        return False


def test_sigterm_drains(start: Start) -> None:
    server = start(drain_s=1.0)
    server.wait_ready()
    with server.stream(max_tokens=1000) as stream:
        events = stream.events()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        ready = eventually(lambda: (r := server.get("/readyz")).status == 503 and r)
        assert ready.json["status"] == "draining"
        refused = server.chat()
        assert (refused.status, refused.error["code"]) == (503, "not_ready")
        *_, last, done = events
    assert last["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    assert server.process.wait(30) == 0
    assert not server.children()
    assert not server.config.status_path.parent.exists()


def test_a_stream_that_outlives_the_drain_ends_with_an_error_event(start: Start) -> None:
    server = start(graceful_s=5.5)
    server.wait_ready()
    with server.stream(max_tokens=90_000) as stream:
        events = stream.events()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        *_, last = events
    assert "the server stops" in last["error"]["message"]
    assert server.process.wait(30) == 0


def test_sigint_stops_at_once_and_streams_end_with_an_error_event(server: LiveServer) -> None:
    with server.stream(max_tokens=90_000) as stream:
        events = stream.events()
        next(events)
        server.process.send_signal(signal.SIGINT)
        *_, last = events
    assert last["error"]["code"] == "engine_lost"
    assert server.process.wait(10) == 0


def test_an_engine_that_can_never_run_ends_the_server_with_its_sentence(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UF_TEST_REFUSE", "2 tensors are missing:\n  embed.weight\n  head.weight")
    server = start()
    assert server.process.wait(30) == 78
    assert "error: 2 tensors are missing:\n  embed.weight\n  head.weight\n" in server.log
    assert "Traceback" not in server.log


def test_threads_of_a_starting_server_answer_health_and_say_what_they_wait_for(
    start: Start,
) -> None:
    server = start()
    eventually(lambda: answers(server))
    statuses: set[str] = set()
    ready = in_thread(server.wait_ready)
    while ready.is_alive():
        statuses.add(json.loads(server.get("/readyz").body)["status"])
        assert server.get("/healthz").status == 200
    ready.join()
    assert statuses <= {"starting", "ready"}
