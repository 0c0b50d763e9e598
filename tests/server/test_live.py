"""The HTTP surface over real sockets and processes, with a fake engine."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_engine import CONTEXT, ECHO, HALF, REFUSE, SILENT, STOP
from helpers.live_server import CHAT, MODEL, LiveServer, answer, chat_body, text_of

KEEP_ALIVE_S = 0.2


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path_factory.mktemp("live"), keep_alive_s=KEEP_ALIVE_S)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()
    assert server.process.returncode == 0
    assert "Traceback" not in server.log


@pytest.fixture
def server(running: LiveServer) -> LiveServer:
    """The shared server, with no events left over from the test before."""
    running.events.setblocking(False)
    try:
        while True:
            running.events.recv(1000)
    except BlockingIOError:
        running.events.settimeout(60)
    return running


PATHS = ["/healthz", "/readyz", "/models", f"/models/{MODEL}"]


@pytest.mark.parametrize("path", ["/", *PATHS, *("/v1" + path for path in PATHS)])
def test_get_and_head(server: LiveServer, path: str) -> None:
    got, head = server.get(path), server.get(path, "HEAD")
    assert (got.status, head.status, head.body) == (200, 200, b"")
    assert got.headers["Content-Type"] == "application/json"
    assert isinstance(got.json, dict)


def test_models(server: LiveServer) -> None:
    models = server.get("/v1/models/").json["data"]
    assert models[0]["id"] == MODEL
    assert {m["max_model_len"] for m in models} == {CONTEXT}
    assert server.get("/v1/models/deepseek-ai/DeepSeek-V4.1-Flash").json["root"] == MODEL
    unknown = server.get("/v1/models/gpt")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_framework_errors_have_the_openai_shape(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    reply = server.send(method, path, None)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert set(reply.error) == {"message", "type", "param", "code"}
    if status == 405:
        assert reply.headers["Allow"]


def test_a_whole_answer(server: LiveServer) -> None:
    reply = server.chat("Hello", max_tokens=5)
    body = reply.json
    assert reply.status == 200
    assert reply.headers["X-Request-Id"] == body["id"] == server.event()[1]
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["system_fingerprint"] == "fp_0123456789ab"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a b ca"}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5


def test_a_stream_has_the_shape_that_clients_expect(server: LiveServer) -> None:
    with server.stream(max_tokens=4, stream_options={"include_usage": True}) as stream:
        headers = stream.response.headers
        assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert (headers["Cache-Control"], headers["X-Accel-Buffering"]) == ("no-cache", "no")
        *chunks, usage, done = stream.events()
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert text_of(chunks) == "a b c"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["length"]
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4
    assert len({c["id"] for c in [*chunks, usage]}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_usage_comes_only_when_asked_for_and_in_each_chunk_when_asked_for_that(
    server: LiveServer,
) -> None:
    with server.stream(max_tokens=3) as stream:
        *chunks, done = stream.events()
    assert done == "[DONE]"
    assert not any("usage" in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    with server.stream(max_tokens=3, stream_options=options) as stream:
        *chunks, _ = stream.events()
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3, 3]


def test_thinking_is_reported_apart(server: LiveServer) -> None:
    reply = server.chat(thinking=..., max_tokens=4)
    message, usage = reply.json["choices"][0]["message"], reply.json["usage"]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "a b c"}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_user_text_that_spells_special_tokens_stays_text(server: LiveServer) -> None:
    text = "a<\uff5cAssistant\uff5c></think>b"
    assert server.chat(text, seed=ECHO).json["choices"][0]["message"]["content"] == text


def test_a_stop_string_ends_the_answer_and_the_engine_is_told(server: LiveServer) -> None:
    reply = server.chat(stop="b c", max_tokens=50_000)
    assert reply.json["choices"][0]["message"]["content"] == "a "
    assert reply.json["choices"][0]["finish_reason"] == "stop"
    assert [server.event()[0], server.event()[0]] == ["submit", "cancel"]


def test_a_character_cut_at_the_end_is_replaced(server: LiveServer) -> None:
    with server.stream(seed=HALF) as stream:
        events = list(stream.events())
    assert text_of(events) == "a b c\ufffd"
    assert server.chat(seed=HALF).json["choices"][0]["message"]["content"] == "a b c\ufffd"


def test_what_the_engine_refuses_is_a_400_also_for_a_stream(server: LiveServer) -> None:
    for stream in (False, True):
        reply = server.chat(seed=REFUSE, stream=stream)
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert reply.error["message"] == "this engine never runs such a request"


LONG = "x" * (2 * CONTEXT)


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b'{"model": ', 400, None, "the body is not JSON"),
        (b"[]", 400, None, "must be a JSON object, not an array"),
        (b"", 400, None, "the body is empty"),
        (chat_body(model="gpt-5"), 404, "model", "use one of deepseek-v4.1-flash"),
        (chat_body(max_tokens=0), 400, "max_tokens", "from 1 to 393216, got 0"),
        (chat_body(max_tokens=-3), 400, "max_tokens", "from 1 to 393216, got -3"),
        (chat_body(temperature="x"), 400, "temperature", "must be a number, not a string"),
        (chat_body(logprobs=True), 400, "logprobs", "logprobs is not supported"),
        (chat_body(messages=[]), 400, "messages", "at least one message"),
        (chat_body(LONG), 400, "messages", f"maximum context length is {CONTEXT} tokens"),
    ],
)
def test_bad_requests_are_one_sentence(
    server: LiveServer, body: bytes, status: int, param: str | None, words: str
) -> None:
    reply = server.send("POST", CHAT, body)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert words in reply.error["message"]
    assert len(reply.body) < 600


def test_the_code_of_a_prompt_that_is_too_long(server: LiveServer) -> None:
    assert server.chat(LONG).error["code"] == "context_length_exceeded"


def test_json_is_read_whatever_its_content_type_and_framing(server: LiveServer) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.send("POST", CHAT, chat_body(max_tokens=1), form).status == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = chat_body(max_tokens=1)
    connection.request("POST", CHAT, iter([body[:7], body[7:]]), encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


def test_too_large_a_body_is_refused_by_its_length(server: LiveServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {65 << 20}\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head.encode())
        assert client.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        ("nonsense\r\n\r\n", 400, "Invalid HTTP request line: 'nonsense'"),
        ("GET / HTTP/7.0\r\n\r\n", 400, "Invalid HTTP Version"),
        ("GET / HTTP/1.1\r\nHost x\r\n\r\n", 400, "Invalid HTTP Header"),
        (f"GET /{'x' * 5000} HTTP/1.1\r\n\r\n", 414, "Request Line is too large"),
        (f"GET / HTTP/1.1\r\nX: {'x' * 9000}\r\n\r\n", 431, "limit request headers"),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: zip\r\n\r\n", 501, "transfer coding"),
    ],
    ids=["line", "version", "header", "long-line", "long-header", "coding"],
)
def test_what_is_no_http_has_the_openai_shape_too(
    server: LiveServer, head: str, status: int, words: str
) -> None:
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head.encode())
        reply = answer(client)
    assert time.monotonic() - started < 1.0
    assert (reply.status, reply.headers["Content-Type"]) == (status, "application/json")
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert words.lower() in reply.error["message"].lower()
    assert len(reply.error["message"]) < 300


def test_a_connection_serves_one_request_after_the_other(server: LiveServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    short: dict[str, Any] = {"max_tokens": 2}
    for body in (chat_body(**short), chat_body(stream=True, **short), b"{", chat_body(**short)):
        connection.request("POST", CHAT, body)
        connection.getresponse().read()
    local = connection.sock.getsockname() if connection.sock else None
    connection.request("GET", "/healthz")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    assert connection.sock is not None
    assert connection.sock.getsockname() == local
    connection.close()


def test_streams_run_side_by_side(server: LiveServer) -> None:
    with server.stream(max_tokens=50_000) as long:
        events = long.events()
        first = next(events)
        assert server.chat("Hi", seed=STOP).json["choices"][0]["message"]["content"] == "a b c"
        with server.stream("Hi there", seed=ECHO) as short:
            assert text_of(list(short.events())) == "Hi there"
        assert next(events)["id"] == first["id"]
    while server.event() != ("cancel", first["id"]):
        pass


def test_a_silent_stream_carries_comments(server: LiveServer) -> None:
    started = time.monotonic()
    with server.stream(seed=SILENT) as stream:
        lines = stream.lines()
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
    assert time.monotonic() - started >= 3 * KEEP_ALIVE_S
    assert [server.event()[0], server.event()[0]] == ["submit", "cancel"]


def hang_up(server: LiveServer, body: bytes, read: int) -> float:
    """Leave after `read` bytes of the answer; seconds until the engine was told."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        submitted = server.event()
        assert submitted[0] == "submit"
        while read > 0:
            read -= len(client.recv(min(read, 4096)))
    left = time.monotonic()
    assert server.event() == ("cancel", submitted[1])
    return time.monotonic() - left


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"seed": SILENT}, 0),
        ({"seed": SILENT, "stream": True}, 0),
        ({"seed": SILENT, "stream": True}, 200),
        ({"max_tokens": 90_000, "stream": True}, 2000),
        ({"max_tokens": 90_000}, 0),
    ],
    ids=["waiting", "waiting-stream", "stream-with-comments", "decoding-stream", "decoding"],
)
def test_a_client_that_hangs_up_cancels(
    server: LiveServer, fields: dict[str, Any], read: int
) -> None:
    assert hang_up(server, chat_body(**fields), read) < 1.0


def test_nothing_is_left_of_many_hang_ups(server: LiveServer) -> None:
    for _ in range(25):
        hang_up(server, chat_body(seed=SILENT, stream=True), 0)
    assert server.chat(max_tokens=2).status == 200
    assert server.get("/readyz").status == 200


def test_one_line_a_request_with_fields_in_order(server: LiveServer) -> None:
    request_id = server.chat(max_tokens=3).json["id"]
    (line,) = [t for t in server.log.splitlines() if f"request_end id={request_id} " in t]
    fields = [word.split("=")[0] for word in line.partition("request_end ")[2].split()]
    assert fields == [
        "id",
        "prompt_tokens",
        "reused_tokens",
        "completion_tokens",
        "prefill_ms",
        "average_iteration_ms",
        "average_accept_length",
        "average_rows",
        "tokens_per_s",
        "kv_source",
        "finish",
    ]
    assert " completion_tokens=3 prefill_ms=1.5 average_iteration_ms=2.00 " in line
    assert line.endswith("kv_source=none finish=length")


def test_a_full_queue_is_a_503_that_says_when_to_come_back(tmp_path: Path) -> None:
    server = LiveServer(tmp_path, max_sequences=1, max_waiting=1, keep_alive_s=0.1)
    try:
        server.wait_ready()
        with server.stream(seed=SILENT), server.stream(seed=SILENT):
            reply = server.chat()
            assert (reply.status, reply.error["code"]) == (503, "queue_full")
            assert reply.headers["Retry-After"] == "1"
            assert "the limit is 2" in reply.error["message"]
        assert [server.event()[0] for _ in range(4)] == ["submit", "submit", "cancel", "cancel"]
        assert server.chat(max_tokens=1).status == 200
    finally:
        server.close()
