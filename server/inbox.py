"""Admission: how many requests may run and wait. A full queue says so at once instead of growing.

The engine orders what it is given; this file only bounds it, by requests and by prompt tokens that
wait. A request takes a place when its head has come (`enter`), so that bodies that never end leave
threads for others, and one in the queue before its prompt is encoded (`admit`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ultraflash.server.errors import Overloaded


class Ticket:
    """One request on its way: entered, then admitted; `close` when it has ended."""

    def __init__(self, inbox: Inbox) -> None:
        """Entered; counted by its inbox already."""
        self._inbox = inbox
        self._open, self._admitted = True, False
        self._waiting_tokens = 0

    def admit(self) -> None:
        """Take a place among those that run or wait.

        Raises:
            Overloaded: naming the limit that is reached.
        """
        self._inbox._admit()
        self._admitted = True

    def wait(self, prompt_tokens: int) -> None:
        """Its prompt waits from now on.

        Raises:
            Overloaded: naming the limit that is reached.
        """
        self._inbox._wait(prompt_tokens)
        self._waiting_tokens = prompt_tokens

    def begun(self) -> None:
        """The engine works for it: its prompt waits no more."""
        if self._waiting_tokens:
            self._inbox._leave(0, 0, self._waiting_tokens)
            self._waiting_tokens = 0

    def close(self) -> None:
        """Give the places back; once or more."""
        if self._open:
            self._open = False
            self._inbox._leave(1, int(self._admitted), self._waiting_tokens)


class Inbox:
    """Counts requests that have entered, live ones, and the prompt tokens of those that wait."""

    def __init__(self, max_live: int, max_waiting_tokens: int, max_entered: int) -> None:
        """Empty; live requests have entered too."""
        self._max_live, self._max_waiting_tokens = max_live, max_waiting_tokens
        self._max_entered = max_entered
        self._lock = threading.Lock()
        self._entered = self._live = self._waiting_tokens = 0

    def enter(self) -> Ticket:
        """A place for one request whose body has not come yet.

        Raises:
            Overloaded: naming the limit that is reached.
        """
        with self._lock:
            if self._entered >= self._max_entered:
                raise Overloaded(
                    f"{self._entered} requests are being received or served and the limit is "
                    f"{self._max_entered}: try again in a moment"
                )
            self._entered += 1
        return Ticket(self)

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return self._live

    def _admit(self) -> None:
        with self._lock:
            if self._live >= self._max_live:
                raise Overloaded(
                    f"{self._live} requests run or wait and the limit is {self._max_live}: "
                    "try again in a moment"
                )
            self._live += 1

    def _wait(self, prompt_tokens: int) -> None:
        with self._lock:
            waiting = self._waiting_tokens + prompt_tokens
            # A single long prompt is always let in: the context limit bounds it.
            if self._waiting_tokens and waiting > self._max_waiting_tokens:
                raise Overloaded(
                    f"{self._waiting_tokens} prompt tokens wait, and {prompt_tokens} more pass the "
                    f"limit of {self._max_waiting_tokens}: try again in a moment"
                )
            self._waiting_tokens = waiting

    def _leave(self, entered: int, live: int, waiting_tokens: int) -> None:
        with self._lock:
            self._entered -= entered
            self._live -= live
            self._waiting_tokens -= waiting_tokens


class Budget:
    """Bounds what is used at once of something, first come, first served."""

    def __init__(self, total: int) -> None:
        """All of it is free."""
        self._total = self._free = total
        self._turn = threading.Lock()  # held by who waits: a large share is not overtaken for ever
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait for a share and keep it inside the block; more than there is means all of it."""
        size = min(size, self._total)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify()
