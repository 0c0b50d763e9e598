from __future__ import annotations

import sys
from pathlib import Path

import pytest

import helpers
from ultraflash.tools import local_server
from ultraflash.tools.local_server import LocalServer, ServerError, readiness

STAND_IN = (sys.executable, str(Path(helpers.__path__[0]) / "stand_in_server.py"))


def test_ready_after_the_reasons_were_reported() -> None:
    reasons: list[str] = []
    with LocalServer("--slow", "0.3", command=STAND_IN) as server:
        seconds = server.wait_ready(20, reasons.append)
        assert readiness(server.url) == (True, "ready")
        assert server.memory_bytes() > 2**20
    assert seconds >= 0.3
    assert reasons[-1] == "reading weights"


def test_every_process_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "_STOP_SECONDS", 1.0)
    with LocalServer("--stubborn", command=STAND_IN) as server:
        server.wait_ready(20)
        family = server.processes()
        assert len(family) == 2, "the server and the child that left its session"
    assert not any(local_server._alive(process) for process in family)
    assert not server.log.exists()


def test_processes_end_when_the_block_fails() -> None:
    family = []

    def fail() -> None:
        with LocalServer(command=STAND_IN) as server:
            server.wait_ready(20)
            family.extend(server.processes())
            raise ValueError(server.log)

    with pytest.raises(ValueError, match="ultraflash-server") as caught:
        fail()
    assert family
    assert not any(local_server._alive(process) for process in family)
    log = Path(str(caught.value))
    assert log.exists(), "kept, since it may tell why"
    log.unlink()


def test_a_server_that_ends_early_is_quoted() -> None:
    server = LocalServer("--die", "port 80 is in use", command=STAND_IN)
    with pytest.raises(ServerError, match=r"status 1 .*: port 80 is in use"), server:
        server.wait_ready(20)
    server.log.unlink()


def test_a_server_that_never_gets_ready_is_quoted() -> None:
    server = LocalServer("--slow", "99", command=STAND_IN)
    with pytest.raises(ServerError, match="not ready after 2 s: reading weights"), server:
        server.wait_ready(2)
    server.log.unlink()


def test_nobody_there() -> None:
    ready, reason = readiness("http://127.0.0.1:9")
    assert not ready
    assert "does not answer" in reason


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://localhost", "http://", "http://a:b"])
def test_an_address_we_cannot_use(url: str) -> None:
    with pytest.raises(ServerError, match="no address like"):
        local_server.connect(url, 1.0)
