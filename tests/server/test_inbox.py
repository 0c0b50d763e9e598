from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from helpers.live_server import eventually
from ultraflash.server.errors import Overloaded
from ultraflash.server.hangup import HangupWatcher
from ultraflash.server.inbox import Budget, Inbox, Ticket


def admitted(inbox: Inbox, prompt_tokens: int = 1) -> Ticket:
    ticket = inbox.enter()
    try:
        ticket.admit()
        ticket.wait(prompt_tokens)
    except Overloaded:
        ticket.close()
        raise
    return ticket


def test_a_full_queue_says_so_and_a_place_comes_free() -> None:
    inbox = Inbox(max_live=2, max_waiting_tokens=1000, max_entered=9)
    first, second = admitted(inbox), admitted(inbox)
    with pytest.raises(Overloaded, match="2 requests run or wait and the limit is 2"):
        admitted(inbox)
    first.close()
    first.close()
    assert inbox.live == 1
    third = admitted(inbox)
    second.close()
    third.close()
    assert inbox.live == 0


def test_requests_that_are_still_received_are_bounded_too() -> None:
    inbox = Inbox(max_live=2, max_waiting_tokens=1000, max_entered=3)
    live, one, two = admitted(inbox), inbox.enter(), inbox.enter()
    with pytest.raises(Overloaded, match="3 requests are being received or served and the limit"):
        inbox.enter()
    assert inbox.live == 1
    one.close()
    three = inbox.enter()
    two.admit()
    for ticket in (live, two, three):
        ticket.close()
    assert inbox.live == 0
    assert [inbox.enter() for _ in range(3)]


def test_waiting_prompt_tokens_are_bounded_but_one_long_prompt_always_enters() -> None:
    inbox = Inbox(max_live=10, max_waiting_tokens=100, max_entered=10)
    long = admitted(inbox, 500)
    with pytest.raises(Overloaded, match="500 prompt tokens wait, and 1 more"):
        admitted(inbox, 1)
    long.begun()
    admitted(inbox, 100).close()
    long.close()
    admitted(inbox, 100)
    with pytest.raises(Overloaded):
        admitted(inbox, 1)
    assert inbox.live == 1


def test_a_budget_is_shared_in_order_and_never_passed() -> None:
    budget, entered = Budget(10), queue.SimpleQueue[int]()
    leave = {size: threading.Event() for size in (6, 50, 4)}

    def work(size: int) -> None:
        with budget.hold(size):
            entered.put(size)
            assert leave[size].wait(30)

    threads = [threading.Thread(target=work, args=(size,)) for size in leave]
    threads[0].start()
    assert entered.get(timeout=30) == 6
    threads[1].start()
    eventually(budget._turn.locked)  # the large one waits for all of it
    threads[2].start()
    with pytest.raises(queue.Empty):
        entered.get(timeout=0.2)  # though 4 are free: it came later
    leave[6].set()
    assert entered.get(timeout=30) == 50, "more than there is means all of it"
    with pytest.raises(queue.Empty):
        entered.get(timeout=0.2)
    leave[50].set()
    assert entered.get(timeout=30) == 4
    leave[4].set()
    for thread in threads:
        thread.join(30)
    with budget.hold(10):
        pass


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
