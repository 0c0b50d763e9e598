"""A server of real processes on loopback, and a client that shows what is on the wire."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultraflash.server.__main__ import bind
from ultraflash.server.config import ServerConfig

FAKE = Path(__file__).with_name("fake_gunicorn_conf.py")
REAL = "python:ultraflash.server.gunicorn_conf"
DEADLINE_S = 60.0
MODEL = "deepseek-v4.1-flash"
CHAT = "/v1/chat/completions"


def eventually(what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `what`; for states of other processes that announce no event."""
    end = time.monotonic() + deadline_s
    while not (value := what()):
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.01)
    return value


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])


class LiveServer:
    """gunicorn with supervisor and engine process; `settings` as in `ServerConfig`."""

    def __init__(self, folder: Path, settings_file: str | Path = FAKE, **settings: Any) -> None:
        self.log_path = folder / "server.log"
        self.events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.events.bind(str(folder / "events"))
        self.events.settimeout(DEADLINE_S)
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        run_dir = folder / "run"
        run_dir.mkdir()
        fd = listener.fileno()
        settings = {"drain_s": 0.0, "graceful_s": 20.0, **settings}
        self.config = ServerConfig(listen_fd=fd, run_dir=run_dir, **settings)
        extra = {"UF_TEST_EVENTS": str(folder / "events")}
        command = ["-m", "gunicorn", "-c", str(settings_file), "ultraflash.server.wsgi:app"]
        with listener, self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**self.config.environment(), **extra},
                stdout=log,
                stderr=log,
                pass_fds=[fd],
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return self.get("/readyz").status == 200

        eventually(ready)

    def event(self) -> tuple[str, str]:
        """The next thing that the fake engine was told: submit or cancel, and the key."""
        what, key = self.events.recv(1000).decode().split()
        return what, key

    def get(self, path: str, method: str = "GET") -> Reply:
        return self.send(method, path, None)

    def send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def chat(self, content: str = "Hello", **fields: Any) -> Reply:
        return self.send("POST", "/v1/chat/completions", chat_body(content, **fields))

    def stream(self, content: str = "Hello", **fields: Any) -> Stream:
        return Stream(self.port, chat_body(content, **{"stream": True, **fields}))

    def children(self) -> list[int]:
        """Every process that belongs to this server, gunicorn's master excepted."""
        mark = f"UF_RUN_DIR={self.config.run_dir}".encode()
        return [pid for pid in _pids() if pid != self.process.pid and mark in _environment(pid)]

    def engine_pid(self) -> int:
        status = json.loads(self.config.status_path.read_bytes())
        return int(status["children"]["engine"]["pid"])

    def stop(self, signum: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.stop(signal.SIGINT)
        eventually(lambda: not self.children())
        self.events.close()


class Stream:
    """A streamed chat, event by event."""

    def __init__(self, port: int, body: bytes) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        self.connection.request("POST", "/v1/chat/completions", body)
        self.response = self.connection.getresponse()

    def lines(self) -> Iterator[str]:
        """Events and comments as they come, without the blank lines between them."""
        for line in self.response:
            if text := line.decode().rstrip("\n"):
                yield text

    def events(self) -> Iterator[Any]:
        """The data of each event; `[DONE]` as that text."""
        for line in self.lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)

    def close(self) -> None:
        self.response.close()
        self.connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def chat_body(content: str = "Hello", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    thinking = {"type": "disabled"}
    fields = {"model": MODEL, "messages": messages, "thinking": thinking, **fields}
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()


def text_of(events: list[Any]) -> str:
    """The answer that these events spell."""
    deltas = [c["choices"][0]["delta"] for c in events if c != "[DONE]" and c.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


def answer(client: socket.socket) -> Reply:
    """What a client reads, up to the end of its connection."""
    response = http.client.HTTPResponse(client)
    response.begin()
    reply = Reply(response.status, response.headers, response.read())
    with contextlib.suppress(ConnectionResetError):  # it sent more than was read
        assert client.recv(1) == b"", "it is closed"
    return reply


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> bytes:
    """Empty for processes that have ended or are not ours."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
