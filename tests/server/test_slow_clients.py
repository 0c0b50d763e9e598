"""Requests that never end, more than there are threads: real sockets and processes."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from helpers.live_server import CHAT, LiveServer, answer


def test_bodies_that_never_end_starve_nobody(tmp_path: Path) -> None:
    """More of them than there are threads, each sending a little now and then."""
    server = LiveServer(tmp_path, body_s=3.0)
    clients = []
    try:
        server.wait_ready()
        began = time.monotonic()
        for framing in ["Content-Length: 1000"] * 65 + ["Transfer-Encoding: chunked"] * 65:
            client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
            clients.append(client)
        while time.monotonic() - began < 2.5:
            asked = time.monotonic()
            assert server.get("/readyz").status == 200
            assert time.monotonic() - asked < 1.0
            for client in clients:
                drip(client)
            time.sleep(0.1)
        refused = server.chat()
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        replies = [answer(client) for client in clients]
        assert time.monotonic() - began < 20
        assert {reply.status for reply in replies} == {408, 503}
        slow = [reply.error["message"] for reply in replies if reply.status == 408]
        assert set(slow) == {"the body did not arrive within 3 s: send it faster, or less of it"}
        assert len(slow) == server.config.max_entered
        assert server.chat(max_tokens=1).status == 200
    finally:
        for client in clients:
            client.close()
        server.close()
    assert "Traceback" not in server.log


def test_heads_that_never_end_are_let_go(tmp_path: Path) -> None:
    server = LiveServer(tmp_path, body_s=2.0)
    clients = []
    try:
        server.wait_ready()
        for _ in range(110):  # threads: 100
            client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            client.sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
            clients.append(client)
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            for client in clients:
                drip(client)
            time.sleep(0.1)
        assert server.get("/readyz").status == 200
        assert time.monotonic() - began < 10
        reply = answer(clients[0])
        assert reply.status == 408
        assert reply.error["message"] == (
            "the head of the request did not arrive within 2 s: send it faster"
        )
        assert server.chat(max_tokens=1).status == 200
    finally:
        for client in clients:
            client.close()
        server.close()
    assert "Traceback" not in server.log


def drip(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # some have been refused and closed
        client.sendall(b"1")
