"""The WSGI application. `app` is built when gunicorn asks for it: importing starts nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import falcon

from ultraflash.graphs.model import Model
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.server.arrival import ArrivalClock
from ultraflash.server.chat import ChatService
from ultraflash.server.config import ServerConfig
from ultraflash.server.errors import StartError
from ultraflash.server.hangup import HangupWatcher
from ultraflash.server.inbox import Inbox
from ultraflash.server.link import Link
from ultraflash.server.protocol import ChatProtocol
from ultraflash.server.readiness import Gate
from ultraflash.server.routes import add_routes

BOOT_ERROR = 3  # gunicorn's word for "do not start this worker again"


@dataclass(frozen=True)
class Server:
    """The application and what keeps it going."""

    app: falcon.App[Any, Any]
    service: ChatService


def create_server(config: ServerConfig) -> Server:
    """Build everything; the link and the watcher begin to work.

    Raises:
        StartError: when the tokenizer does not fit.
    """
    checkpoint = config.checkpoint or BUNDLED_CHECKPOINT
    protocol = ChatProtocol.from_checkpoint(checkpoint)
    link, watcher = Link(config.socket_path), HangupWatcher()
    service = ChatService(
        protocol=protocol,
        link=link,
        gate=Gate(link, config.status_path, config.draining_path),
        inbox=Inbox(config.max_live, config.max_waiting_tokens, config.max_entered),
        clock=ArrivalClock(config.body_s),
        watcher=watcher,
        keep_alive_s=config.keep_alive_s,
    )
    app: falcon.App[Any, Any] = falcon.App()
    app.req_options.strip_url_path_trailing_slash = True
    add_routes(app, service, config.context or Model.from_checkpoint(checkpoint).max_position)
    service.gate.start()
    service.clock.start()
    link.start()
    watcher.start()
    return Server(app, service)


_server: Server | None = None


def current_server() -> Server | None:
    """The server of this process, if it is built."""
    return _server


def __getattr__(name: str) -> Any:
    global _server
    if name != "app":
        raise AttributeError(name)
    if _server is None:
        try:
            _server = create_server(ServerConfig.from_env())
        except StartError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(BOOT_ERROR) from error
    return _server.app
