"""The HTTP surface: which path does what, with and without `/v1`, and how errors look."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from typing import Any

import falcon
import msgspec

from ultraflash.server.arrival import stop_reading
from ultraflash.server.body import read_body, too_slow
from ultraflash.server.chat import ChatService
from ultraflash.server.errors import (
    Overloaded,
    Problem,
    RequestError,
    ServerError,
    http_problem,
    internal_problem,
    problem,
)
from ultraflash.server.models import MAIN_NAME, MODEL_NAMES, find_model
from ultraflash.server.readiness import Gate
from ultraflash.server.sse import CONTENT_TYPE

_log = logging.getLogger(__name__)

_BODY_PAUSE_S = 30.0  # a client that pauses this long inside its body is let go
_STALLED_READER_S = 60.0  # so is one that takes nothing of its stream for this long


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    def __init__(self, service: ChatService) -> None:
        """All state is in the service."""
        self._service = service

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Answer, streamed or whole."""
        client: socket.socket = req.env["gunicorn.socket"]
        try:
            ticket = self._service.inbox.enter()
        except Overloaded:
            _leave_rest(req, client)
            raise
        try:
            body = self._receive(req, client)
            call = self._service.begin(body, client, ticket)
        except BaseException:
            ticket.close()
            raise
        resp.set_header("X-Request-Id", call.id)
        if call.streamed:
            resp.content_type = CONTENT_TYPE
            resp.set_header("Cache-Control", "no-cache")
            resp.set_header("X-Accel-Buffering", "no")
            resp.stream = call  # the server closes it when it has sent the last byte, or failed to
            return
        try:
            _send_json(resp, call.complete())
        finally:
            call.close()

    def _receive(self, req: falcon.Request, client: socket.socket) -> bytes:
        clock, body, failure = self._service.clock, b"", None
        client.settimeout(min(_BODY_PAUSE_S, clock.limit_s))
        with clock.watch(client) as arrival:
            try:
                body = read_body(req.env["wsgi.input"], req.content_length)
            except RequestError as error:
                failure = error
        client.settimeout(_STALLED_READER_S)
        if arrival.over:
            failure = too_slow(clock.limit_s)
        if failure is None:
            return body
        if failure.status == 408:
            _leave_rest(req, client)
        raise failure


class Models:
    """`GET /v1/models`: the one model under each of its names."""

    def __init__(self, service: ChatService, context: int) -> None:
        """`context` is told until the engine knows better."""
        self._service, self._context, self._created = service, context, int(time.time())

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """All names, the main one first."""
        data = [self._describe(name) for name in MODEL_NAMES]
        _send_json(resp, msgspec.json.encode({"object": "list", "data": data}))

    on_head = on_get

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """One name, which may hold a slash."""
        _send_json(resp, msgspec.json.encode(self._describe(find_model(name).name)))

    on_head_one = on_get_one

    def _describe(self, name: str) -> dict[str, Any]:
        opened = self._service.link.state.opened
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "deepseek",
            "root": MAIN_NAME,
            "max_model_len": opened.max_seq if opened else self._context,
        }


class Health:
    """`GET /healthz`: this process lives. It asks nobody."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Always 200."""
        _send_json(resp, b'{"status":"ok"}')

    on_head = on_get


class Ready:
    """`GET /readyz`: requests may come, or 503 and why not."""

    def __init__(self, gate: Gate) -> None:
        """All state is in the gate."""
        self._gate = gate

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """200 or 503."""
        now = self._gate.check()
        if not now.ready:
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", "2")
        body = {"status": now.status} | ({} if now.reason is None else {"reason": now.reason})
        _send_json(resp, msgspec.json.encode(body))

    on_head = on_get


class Root:
    """`GET /`: what this is; some clients look here first."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """A line for a person."""
        _send_json(resp, b'{"name":"ultraflash","see":["/v1/models","/readyz"]}')

    on_head = on_get


def add_routes(app: falcon.App[Any, Any], service: ChatService, context: int) -> None:
    """Register every path and the error bodies."""
    models = Models(service, context)
    app.add_route("/", Root())
    for prefix in ("", "/v1"):
        app.add_route(f"{prefix}/chat/completions", ChatCompletions(service))
        app.add_route(f"{prefix}/models", models)
        app.add_route(f"{prefix}/models/{{name:path}}", models, suffix="one")
        app.add_route(f"{prefix}/healthz", Health())
        app.add_route(f"{prefix}/readyz", Ready(service.gate))
    app.set_error_serializer(_framework_error)
    app.add_error_handler(Exception, _unexpected)
    app.add_error_handler(falcon.HTTPError, _http_error)
    app.add_error_handler(ServerError, _server_error)


def _leave_rest(req: falcon.Request, client: socket.socket) -> None:
    """Wait for no more of a body: the connection ends behind the answer.

    gunicorn would read the body to its end otherwise, on this thread, and then, on its main one,
    wait for the client to close.
    """
    req.env["wsgi.input"].failed = True  # gunicorn's mark of a connection not to be used again
    stop_reading(client)


def _send_json(resp: falcon.Response, data: bytes) -> None:
    resp.content_type = falcon.MEDIA_JSON
    resp.data = data


def _send_problem(resp: falcon.Response, found: Problem) -> None:
    resp.status = found.status
    if found.retry_after_s is not None:
        resp.set_header("Retry-After", str(found.retry_after_s))
    _send_json(resp, found.body())


def _server_error(
    req: falcon.Request, resp: falcon.Response, error: ServerError, params: dict[str, Any]
) -> None:
    found = problem(error)
    _log.info("request_refused path=%s status=%d %s", req.path, found.status, found.message)
    _send_problem(resp, found)


def _unexpected(
    req: falcon.Request, resp: falcon.Response, error: Exception, params: dict[str, Any]
) -> None:
    request_id = f"req-{uuid.uuid4().hex}"
    _log.error("%s failed on %s %s", request_id, req.method, req.path, exc_info=error)
    _send_problem(resp, internal_problem(request_id))


def _http_error(
    req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError, params: dict[str, Any]
) -> None:
    for name, value in dict(error.headers or {}).items():
        resp.set_header(name, value)
    _send_problem(resp, http_problem(error.status_code, _framework_text(req, error)))


def _framework_text(req: falcon.Request, error: falcon.HTTPError) -> str:
    if error.status_code == 404:
        return f"there is no {req.path[:200]} here; GET / names what there is"
    if error.status_code == 405:
        return f"{req.method} is not allowed on {req.path[:200]}"
    return error.description or error.title or "the request cannot be served"


def _framework_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """For what the framework refuses before any handler of ours runs."""
    _http_error(req, resp, error, {})
