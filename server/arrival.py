"""Bounds the time that the head or the body of a request may take to arrive, however it drips in.

The timeout of a socket bounds the pauses, not their sum: a byte now and then would hold a thread
for ever. So one thread shuts the reading half of sockets whose time is over, which wakes whoever
reads from them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class Arrival:
    """A head or a body on its way; `over` when its time was and nothing more is read."""

    client: socket.socket
    due: float
    over: bool = False

    def cut(self) -> None:
        """Read no more from this client; what was received so far still comes."""
        self.over = True
        stop_reading(self.client)


class ArrivalClock:
    """Cuts off what takes more than `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        """The thread begins with `start`."""
        self.limit_s = limit_s
        self._changed = threading.Condition()
        self._arrivals: dict[Arrival, None] = {}  # the oldest, which is due first, in front
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def start(self) -> None:
        """Begin watching."""
        self._thread.start()

    @contextlib.contextmanager
    def watch(self, client: socket.socket) -> Iterator[Arrival]:
        """The time runs inside the block; behind it, `client` is not touched any more."""
        arrival = Arrival(client, time.monotonic() + self.limit_s)
        with self._changed:
            self._arrivals[arrival] = None
            self._changed.notify()
        try:
            yield arrival
        finally:
            with self._changed:
                self._arrivals.pop(arrival, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                first = next(iter(self._arrivals), None)
                left = None if first is None else first.due - time.monotonic()
                if first is None or (left is not None and left > 0):
                    self._changed.wait(left)
                else:
                    del self._arrivals[first]
                    first.cut()


def stop_reading(client: socket.socket) -> None:
    """Let every later read of a socket end at once; writing goes on."""
    with contextlib.suppress(OSError):  # it is closed already
        client.shutdown(socket.SHUT_RD)
