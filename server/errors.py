"""What can go wrong in this room; only here does it become a status and an OpenAI error body.

    ServerError
    ├── StartError              the server cannot start: one sentence for the terminal
    ├── RequestError(field)     the client's fault: 400, 404, 408, 413
    ├── Overloaded              the queue is full: 503 with Retry-After
    ├── Unready                 starting, draining, or the engine is gone: 503 with Retry-After
    ├── EngineLost              the engine process ended under a running request
    └── ClientGone              nobody waits for the answer any more

Every text is one sentence a stranger can act on: what, value, limit, remedy; it never repeats long
input.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class ServerError(Exception):
    """Base of everything that `ultraflash.server` raises on purpose."""


class StartError(ServerError):
    """The server cannot start as asked."""


class RequestError(ServerError):
    """A request that cannot be served; `field` names what is wrong, as the client spells it."""

    def __init__(
        self, field: str | None, message: str, *, code: str | None = None, status: int = 400
    ) -> None:
        """Keep the parts of the error body apart."""
        super().__init__(message)
        self.field, self.message, self.code, self.status = field, message, code, status


class Overloaded(ServerError):
    """More requests wait than the queue holds."""


class Unready(ServerError):
    """The engine cannot take requests now."""


class EngineLost(ServerError):
    """The engine process ended, or gave up, while this request ran."""


class ClientGone(ServerError):
    """The client hung up."""


@dataclass(frozen=True)
class Problem:
    """An error as a client sees it: HTTP status and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """The JSON error body; also the data of an error event in a stream."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return msgspec.json.encode({"error": {**fields, "code": self.code}})


def problem(error: ServerError) -> Problem:
    """What a client is told about `error`."""
    match error:
        case RequestError():
            kind = "not_found_error" if error.status == 404 else "invalid_request_error"
            return Problem(error.status, error.message, kind, error.field, error.code)
        case Overloaded():
            return Problem(503, str(error), "overloaded", code="queue_full", retry_after_s=1)
        case Unready():
            return Problem(503, str(error), "overloaded", code="not_ready", retry_after_s=2)
        case EngineLost():
            return Problem(503, str(error), "server_error", code="engine_lost", retry_after_s=2)
        case ClientGone():
            return Problem(499, str(error), "invalid_request_error")
    return Problem(500, str(error), "server_error", code="internal_error")


def internal_problem(request_id: str) -> Problem:
    """What a client is told about a fault of ours: an id to look for in the log, never a trace."""
    text = f"the server failed on this request; its log names the cause under {request_id}"
    return Problem(500, text, "server_error", code="internal_error")


def http_problem(status: int, text: str) -> Problem:
    """What a client is told when the framework refused the request (404, 405, …)."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    return Problem(status, text, kind if status < 500 else "server_error", code=code)
