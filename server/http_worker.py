"""gunicorn's gthread worker; what it refuses itself has the error body that clients expect.

What is no HTTP/1.1 never reaches the application; gunicorn would answer it with a page of HTML.
"""

from __future__ import annotations

import http
import logging
import socket
import uuid
from typing import Any

from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker

from ultraflash.server.body_clock import stop_reading
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


class JsonErrorWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """Says what is wrong with a request as the application does."""

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: BaseException) -> None:
        """Answer a request that could not be read, or whose handling failed; then it is closed."""
        if isinstance(exc, errors.ParseException) and not isinstance(exc, _OURS):
            found = http_problem(_STATUS.get(type(exc), 400), _sentence(exc))
            _log.info("request_refused status=%d %s", found.status, found.message)
        else:
            request_id = f"req-{uuid.uuid4().hex}"
            _log.error("%s failed outside of the application", request_id, exc_info=exc)
            found = internal_problem(request_id)
        try:
            client.settimeout(_SEND_S)
            client.sendall(_response(found))
            stop_reading(client)  # else gunicorn's main thread waits for its last words
        except OSError as error:
            _log.info("nobody took the answer to a malformed request (%s)", error)


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
