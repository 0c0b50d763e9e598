"""What cannot be provoked from outside: faults of our own, and what the master must not load."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any, cast

import falcon
import falcon.testing
import pytest

from helpers.live_server import chat_body
from ultraflash.server.arrival import ArrivalClock
from ultraflash.server.chat import ChatService
from ultraflash.server.errors import ClientGone, EngineLost, Overloaded, ServerError
from ultraflash.server.inbox import Inbox, Ticket
from ultraflash.server.routes import add_routes


class BrokenService:
    """Raises what it is given."""

    gate = link = None

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.inbox, self.clock = Inbox(1, 1, 1), ArrivalClock(1.0)

    def begin(self, data: bytes, client: object, ticket: Ticket) -> Any:
        ticket.admit()
        raise self._error


def post(error: Exception) -> falcon.testing.Result:
    app: falcon.App[Any, Any] = falcon.App()
    service = BrokenService(error)
    add_routes(app, cast(ChatService, service), 10)
    client = falcon.testing.TestClient(app)
    with socket.socket() as peer:
        extras = {"gunicorn.socket": peer}
        result = client.simulate_post("/v1/chat/completions", body=chat_body(), extras=extras)
    service.inbox.enter().admit()  # its places are free again
    return result


def test_a_fault_of_ours_is_a_500_with_an_id_that_the_log_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = post(ZeroDivisionError("secret"))
    error = json.loads(result.content)["error"]
    assert (result.status_code, error["code"]) == (500, "internal_error")
    assert "secret" not in error["message"]
    request_id = error["message"].split()[-1]
    assert request_id in caplog.text
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full"), 503, "queue_full"),
        (EngineLost("gone"), 503, "engine_lost"),
        (ClientGone("left"), 499, None),
        (ServerError("odd"), 500, "internal_error"),
    ],
)
def test_statuses_of_our_exceptions(error: Exception, status: int, code: str | None) -> None:
    result = post(error)
    assert result.status_code == status
    assert json.loads(result.content)["error"]["code"] == code


def test_the_master_loads_nothing_heavy() -> None:
    code = (
        "import sys, ultraflash.server.gunicorn_conf\n"
        "heavy = ('numpy', 'ultraflash.runtime', 'deepseek_recipe', 'falcon')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "import os, shutil; shutil.rmtree(os.environ['UF_RUN_DIR'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
