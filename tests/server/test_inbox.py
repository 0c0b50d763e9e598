from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from ultraflash.server.errors import Overloaded
from ultraflash.server.hangup import HangupWatcher
from ultraflash.server.inbox import Inbox


def test_a_full_queue_says_so_and_a_place_comes_free() -> None:
    inbox = Inbox(max_live=2, max_waiting_tokens=1000)
    first, second = inbox.admit(1), inbox.admit(1)
    with pytest.raises(Overloaded, match="2 requests run or wait and the limit is 2"):
        inbox.admit(1)
    first.close()
    first.close()
    assert inbox.live == 1
    third = inbox.admit(1)
    second.close()
    third.close()
    assert inbox.live == 0


def test_waiting_prompt_tokens_are_bounded_but_one_long_prompt_always_enters() -> None:
    inbox = Inbox(max_live=10, max_waiting_tokens=100)
    long = inbox.admit(500)
    with pytest.raises(Overloaded, match="500 prompt tokens wait, and 1 more"):
        inbox.admit(1)
    long.begun()
    inbox.admit(100).close()
    long.close()
    inbox.admit(100)
    with pytest.raises(Overloaded):
        inbox.admit(1)


@pytest.fixture
def watcher() -> Iterator[HangupWatcher]:
    watcher = HangupWatcher()
    watcher.start()
    yield watcher
    watcher.close()


def test_a_close_is_reported_once_and_data_is_not(watcher: HangupWatcher) -> None:
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    (a, a_peer), (b, b_peer) = socket.socketpair(), socket.socketpair()
    with a, b:
        watcher.watch(a.fileno(), lambda: gone.put("a"))
        watcher.watch(b.fileno(), lambda: gone.put("b"))
        b_peer.sendall(b"pipelined request")
        a_peer.close()
        assert gone.get(timeout=20) == "a"
        b_peer.close()
        assert gone.get(timeout=20) == "b"
        assert gone.empty()
        watcher.unwatch(a.fileno())


def test_a_half_close_counts_as_gone(watcher: HangupWatcher) -> None:
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    a, peer = socket.socketpair()
    with a, peer:
        watcher.watch(a.fileno(), lambda: gone.put("a"))
        peer.shutdown(socket.SHUT_WR)
        assert gone.get(timeout=20) == "a"


def test_nothing_is_reported_after_unwatch(watcher: HangupWatcher) -> None:
    gone: queue.SimpleQueue[str] = queue.SimpleQueue()
    (a, a_peer), (b, b_peer) = socket.socketpair(), socket.socketpair()
    with a, b:
        watcher.watch(a.fileno(), lambda: gone.put("a"))
        watcher.watch(b.fileno(), lambda: gone.put("b"))
        watcher.unwatch(a.fileno())
        a_peer.close()
        b_peer.close()
        assert gone.get(timeout=20) == "b"
        assert gone.empty()
