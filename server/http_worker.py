"""gunicorn's gthread worker; what it refuses itself has the error body that clients expect.

What is no HTTP/1.1 never reaches the application; gunicorn would answer it with a page of HTML, and
wait for a head on a thread of the pool for as long as it takes.
"""

from __future__ import annotations

import contextlib
import http
import logging
import socket
import uuid
from typing import Any

from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker

from ultraflash.server.arrival import ArrivalClock, stop_reading
from ultraflash.server.config import ServerConfig
from ultraflash.server.errors import Problem, http_problem, internal_problem

_log = logging.getLogger(__name__)

_STATUS = {
    errors.LimitRequestLine: 414,
    errors.LimitRequestHeaders: 431,
    errors.ExpectationFailed: 417,
    errors.UnsupportedTransferCoding: 501,
    errors.ForbiddenProxyRequest: 403,
}
_OURS = (
    errors.InvalidResponseHeader,
    errors.InvalidResponseHeaderName,
    errors.ConfigurationProblem,
)
_SEND_S = 5.0


class HttpWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """Refuses what is wrong with a request as the application does, or how long its head takes."""

    def init_process(self) -> None:
        """In the worker process, before it serves."""
        self._heads = ArrivalClock(ServerConfig.from_env().head_s)
        self._heads.start()
        super().init_process()

    def handle(self, conn: Any) -> Any:
        """Read a head from a connection and serve the request, on a thread of the pool."""
        with contextlib.ExitStack() as reading:
            head = reading.enter_context(self._heads.watch(conn.sock))
            conn.head, conn.head_is_read = head, reading.close
            again = super().handle(conn)
        if head.over:
            text = f"the head of the request did not arrive within {self._heads.limit_s:g} s"
            self._refuse(conn.sock, http_problem(408, f"{text}: send it faster"))
        return again

    def handle_request(self, req: Any, conn: Any) -> Any:
        """Serve a request whose head is read."""
        conn.head_is_read()
        conn.head.over = False  # if it was cut off, then behind its end
        return super().handle_request(req, conn)

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answer a request that could not be read, or whose handling failed; then it is closed."""
        if isinstance(exc, errors.ParseException) and not isinstance(exc, _OURS):
            self._refuse(client, http_problem(_STATUS.get(type(exc), 400), _sentence(exc)))
        else:
            request_id = f"req-{uuid.uuid4().hex}"
            _log.error("%s failed outside of the application", request_id, exc_info=exc)
            self._refuse(client, internal_problem(request_id))

    def _refuse(self, client: socket.socket, found: Problem) -> None:
        _log.info("request_refused status=%d %s", found.status, found.message)
        try:
            client.settimeout(_SEND_S)
            client.sendall(_response(found))
            stop_reading(client)  # else gunicorn's main thread waits for its last words
        except OSError as error:
            _log.info("nobody took this answer (%s)", error)


def _sentence(exc: Exception) -> str:
    text = " ".join(str(exc).split())[:200] or type(exc).__name__
    return f"the request is no HTTP/1.1 that this server reads ({text}): mend its head"


def _response(found: Problem) -> bytes:
    body = found.body()
    head = (
        f"HTTP/1.1 {found.status} {http.HTTPStatus(found.status).phrase}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body
