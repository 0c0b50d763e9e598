"""Notices clients that went away, also while nothing is being written to them.

One thread waits for the other side's close on all watched sockets. A client that only closed its
sending half counts as gone, as in other servers.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

from ultraflash.server.exchange import Wake

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class HangupWatcher:
    """Calls back, once, when the peer of a watched socket closes."""

    def __init__(self) -> None:
        """Nothing watched; the thread begins with `start`."""
        self._epoll = select.epoll()
        self._wake = Wake()
        self._lock = threading.Lock()  # a callback never runs after its `unwatch` has returned
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._closing = False
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="hangups", daemon=True)

    def start(self) -> None:
        """Begin watching."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._epoll.close()
        self._wake.close()

    def watch(self, fd: int, gone: Callable[[], None]) -> None:
        """Call `gone` from the watching thread when the peer of `fd` closes."""
        with self._lock:
            self._callbacks[fd] = gone
            self._epoll.register(fd, select.EPOLLRDHUP)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; to be called before it is closed."""
        with self._lock:
            if self._callbacks.pop(fd, None) is not None:
                self._epoll.unregister(fd)

    def _run(self) -> None:
        while not self._closing:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    # The event may be older than the present owner of this descriptor number.
                    if fd in self._callbacks and _is_gone(fd):
                        self._epoll.unregister(fd)
                        self._callbacks.pop(fd)()


def _is_gone(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return any(event & _GONE for _, event in poll.poll(0))
