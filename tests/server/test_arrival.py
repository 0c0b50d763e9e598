from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from ultraflash.server.arrival import ArrivalClock

LIMIT_S = 0.2


@pytest.fixture
def clock() -> ArrivalClock:
    clock = ArrivalClock(LIMIT_S)
    clock.start()
    return clock


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
        with client, served:
            served.settimeout(30)
            yield client, served


def test_who_waits_for_a_body_is_woken_when_its_time_is_over(
    clock: ArrivalClock, pair: tuple[socket.socket, socket.socket]
) -> None:
    client, served = pair
    client.sendall(b"abc")
    started = time.monotonic()
    with clock.watch(served) as arrival:
        assert served.recv(10) == b"abc"
        assert served.recv(10) == b""
    assert arrival.over
    assert LIMIT_S <= time.monotonic() - started < 10
    served.sendall(b"408")
    assert client.recv(10) == b"408"


def test_a_body_that_came_in_time_leaves_its_connection_alone(
    clock: ArrivalClock, pair: tuple[socket.socket, socket.socket]
) -> None:
    _, served = pair
    with clock.watch(served) as early:
        pass
    with clock.watch(served) as late:
        time.sleep(2 * LIMIT_S)
    assert (early.over, late.over) == (False, True), "each has a time of its own"


def test_a_connection_that_is_gone_does_not_end_the_clock(
    clock: ArrivalClock, pair: tuple[socket.socket, socket.socket]
) -> None:
    _, served = pair
    gone = socket.socket()
    gone.close()
    with clock.watch(gone) as closed, clock.watch(served) as open_:
        assert served.recv(10) == b""
    assert closed.over
    assert open_.over
