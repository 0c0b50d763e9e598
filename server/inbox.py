"""Admission: how many requests may run and wait. A full queue says so at once instead of growing.

The engine orders what it is given; this file only bounds it, by requests and by prompt tokens that
wait.
"""

from __future__ import annotations

import threading

from ultraflash.server.errors import Overloaded


class Ticket:
    """One admitted request; `begun` when the engine works for it, `close` when it has ended."""

    def __init__(self, inbox: Inbox, prompt_tokens: int) -> None:
        """Counted by its inbox already."""
        self._inbox = inbox
        self._waiting_tokens = prompt_tokens
        self._open = True

    def begun(self) -> None:
        """Its prompt waits no more."""
        if self._waiting_tokens:
            self._inbox._leave(0, self._waiting_tokens)
            self._waiting_tokens = 0

    def close(self) -> None:
        """Give the place back; once or more."""
        if self._open:
            self._open = False
            self._inbox._leave(1, self._waiting_tokens)


class Inbox:
    """Counts live requests and the prompt tokens of those that wait."""

    def __init__(self, max_live: int, max_waiting_tokens: int) -> None:
        """Empty."""
        self._max_live, self._max_waiting_tokens = max_live, max_waiting_tokens
        self._lock = threading.Lock()
        self._live = self._waiting_tokens = 0

    def admit(self, prompt_tokens: int) -> Ticket:
        """A place for one request.

        Raises:
            Overloaded: naming the limit that is reached.
        """
        with self._lock:
            if self._live >= self._max_live:
                raise Overloaded(
                    f"{self._live} requests run or wait and the limit is {self._max_live}: "
                    "try again in a moment"
                )
            waiting = self._waiting_tokens + prompt_tokens
            # A single long prompt is always let in: the context limit bounds it.
            if self._waiting_tokens and waiting > self._max_waiting_tokens:
                raise Overloaded(
                    f"{self._waiting_tokens} prompt tokens wait, and {prompt_tokens} more pass the "
                    f"limit of {self._max_waiting_tokens}: try again in a moment"
                )
            self._live += 1
            self._waiting_tokens = waiting
        return Ticket(self, prompt_tokens)

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return self._live

    def _leave(self, requests: int, waiting_tokens: int) -> None:
        with self._lock:
            self._live -= requests
            self._waiting_tokens -= waiting_tokens
