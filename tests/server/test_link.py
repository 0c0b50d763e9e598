"""Both ends of the socket in one process, with an engine that the tests script."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.live_server import eventually
from ultraflash.runtime import Generation, RequestError, Step
from ultraflash.server import errors
from ultraflash.server import exchange as exchange_module
from ultraflash.server.exchange import Exchange
from ultraflash.server.link import EngineStream, Link
from ultraflash.server.messages import Opened, Opening, Submit, frame, pack_ids
from ultraflash.server.worker import EngineLoop

WAIT_S = 20.0


class ScriptedEngine:
    """Steps only when a test lets it; tells the test what it was asked."""

    fingerprint, max_seq = "f", 100

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.steps: queue.SimpleQueue[list[Step]] = queue.SimpleQueue()
        self.live: set[str] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def submit(self, key: str, request: Generation) -> None:
        if request.max_tokens == 13:
            raise RequestError("max_tokens", "13 brings bad luck")
        self.live.add(key)
        self.told.put(("submit", key))

    def cancel(self, key: str) -> None:
        self.live.discard(key)
        self.told.put(("cancel", key))

    def step(self) -> list[Step]:
        try:
            return self.steps.get(timeout=0.01)
        except queue.Empty:
            return []

    def close(self) -> None:
        self.live.clear()

    def next_told(self) -> tuple[str, str]:
        return self.told.get(timeout=WAIT_S)


class Side:
    """The engine process's side."""

    def __init__(self, path: Path) -> None:
        self.engine, self.exchange = ScriptedEngine(), Exchange(path)
        self.loop = EngineLoop(self.engine, self.exchange)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def open(self) -> None:
        self.exchange.announce(Opened("f", 100))

    def close(self) -> None:
        self.loop.stop()
        self._thread.join()
        self.exchange.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def side(path: Path) -> Iterator[Side]:
    side = Side(path)
    yield side
    side.close()


@pytest.fixture
def link(path: Path) -> Iterator[Link]:
    link = Link(path)
    link.start()
    yield link
    link.close()


def submission(key: str, max_tokens: int = 5) -> Submit:
    return Submit(key, pack_ids([1, 2]), max_tokens, 1.0, 1.0, 0, None, 0, False)


def step(key: str, *tokens: int, finish: str | None = None) -> Step:
    return Step(key, tokens, finish, 2, 0, 1.0, 1.0)


def tokens_of(stream: EngineStream) -> list[int]:
    item = stream.get(WAIT_S)
    assert item is not None
    return item.tokens


def test_requests_get_their_own_tokens(side: Side, link: Link) -> None:
    side.open()
    assert link.wait_opened(WAIT_S)
    a, b = link.submit(submission("a")), link.submit(submission("b"))
    assert [side.engine.next_told(), side.engine.next_told()] == [("submit", "a"), ("submit", "b")]
    side.engine.steps.put([step("a", 1), step("b", 2)])
    side.engine.steps.put([step("a", 3, finish="stop"), step("b", 4)])
    assert [tokens_of(a), tokens_of(a), tokens_of(b), tokens_of(b)] == [[1], [3], [2], [4]]
    assert a.get(0) is None
    assert link.state.pending == 1


def test_nothing_is_taken_before_the_engine_is_open(side: Side, link: Link) -> None:
    side.exchange.announce(Opening(5, 10))
    eventually(lambda: link.state.progress == Opening(5, 10))
    assert not link.wait_opened(0)
    with pytest.raises(errors.Unready):
        link.submit(submission("a"))
    side.open()
    assert link.wait_opened(WAIT_S)
    link.submit(submission("a"))
    assert side.engine.next_told() == ("submit", "a")


def test_what_the_engine_refuses_is_an_error_of_that_request_alone(side: Side, link: Link) -> None:
    side.open()
    assert link.wait_opened(WAIT_S)
    good, bad = link.submit(submission("a")), link.submit(submission("b", max_tokens=13))
    with pytest.raises(errors.RequestError, match="bad luck") as caught:
        bad.get(WAIT_S)
    assert caught.value.field == "max_tokens"
    twin = link.submit(submission("a"))
    with pytest.raises(errors.RequestError, match="in use"):
        twin.get(WAIT_S)
    assert good is not twin


def test_steps_before_the_end_of_the_engine_are_not_lost(path: Path, link: Link) -> None:
    side = Side(path)
    side.open()
    assert link.wait_opened(WAIT_S)
    stream = link.submit(submission("a"))
    assert side.engine.next_told() == ("submit", "a")
    side.engine.steps.put([step("a", 1)])
    assert tokens_of(stream) == [1]
    side.engine.steps.put([step("a", 5)])
    eventually(lambda: not side.engine.steps.qsize())
    side.close()
    eventually(lambda: link.state.pending == 0)
    assert [item.tokens for item in stream.get_more()] == [[5]]
    assert stream.get_more() == []
    with pytest.raises(errors.EngineLost):
        stream.get(WAIT_S)


def test_a_hang_up_reaches_the_engine_and_the_reader(side: Side, link: Link) -> None:
    side.open()
    assert link.wait_opened(WAIT_S)
    stream = link.submit(submission("a"))
    assert side.engine.next_told() == ("submit", "a")
    stream.hang_up()
    with pytest.raises(errors.ClientGone):
        stream.get(WAIT_S)
    assert side.engine.next_told() == ("cancel", "a")
    stream.close()
    assert link.state.pending == 0


def test_the_end_of_the_engine_ends_every_stream_and_the_next_engine_is_found(
    path: Path, link: Link
) -> None:
    first = Side(path)
    first.open()
    assert link.wait_opened(WAIT_S)
    streams = [link.submit(submission(key)) for key in "ab"]
    first.close()
    for stream in streams:
        with pytest.raises(errors.EngineLost):
            stream.get(WAIT_S)
    second = Side(path)
    second.open()
    assert link.wait_opened(WAIT_S)
    stream = link.submit(submission("c"))
    assert second.engine.next_told() == ("submit", "c")
    second.engine.steps.put([step("c", 9, finish="length")])
    assert tokens_of(stream) == [9]
    second.close()


def test_the_end_of_an_http_process_cancels_its_requests(side: Side, path: Path) -> None:
    side.open()
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    client.sendall(frame(submission("a")) + frame(submission("b")))
    assert {side.engine.next_told() for _ in "ab"} == {
        ("submit", "a"),
        ("submit", "b"),
    }
    client.close()
    assert {side.engine.next_told() for _ in "ab"} == {
        ("cancel", "a"),
        ("cancel", "b"),
    }


@pytest.mark.parametrize(
    "noise", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc0", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_who_speaks_another_protocol_is_dropped(side: Side, path: Path, noise: bytes) -> None:
    side.open()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(str(path))
        client.sendall(noise)
        while client.recv(4096):  # the greeting, then the end
            pass


def test_a_reader_that_stays_behind_never_holds_the_engine(
    side: Side, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "MAX_BACKLOG_BYTES", 100_000)
    side.open()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(frame(submission("a")))
        assert side.engine.next_told() == ("submit", "a")
        for _ in range(100):  # far more than the socket and the backlog hold
            side.engine.steps.put([step("a", *range(5000))])
        assert side.engine.next_told() == ("cancel", "a")


def test_what_the_socket_does_not_take_at_once_arrives_later(side: Side, path: Path) -> None:
    side.open()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        client.connect(str(path))
        client.sendall(frame(submission("a")))
        assert side.engine.next_told() == ("submit", "a")
        for _ in range(30):
            side.engine.steps.put([step("a", *range(70000, 75000))])
        size = 0
        while size < 30 * 5000 * 5:  # each of these ids has five bytes
            size += len(client.recv(1 << 16))


def test_aborting_all_streams_ends_them_with_the_given_error(side: Side, link: Link) -> None:
    side.open()
    assert link.wait_opened(WAIT_S)
    streams = [link.submit(submission(key)) for key in "ab"]
    link.fail_all(errors.EngineLost("the server stops"))
    for stream in streams:
        with pytest.raises(errors.EngineLost, match="the server stops"):
            stream.get(WAIT_S)
    told = {side.engine.next_told() for _ in range(4)}
    assert {("cancel", "a"), ("cancel", "b")} < told
