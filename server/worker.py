"""The engine process: takes requests from the socket, drives the engine, posts what each step gave.

Two threads: `Exchange` reads the socket, this file's loop steps the engine. One message a step
carries the tokens of all requests. An exception of the engine ends the process on purpose: the HTTP
side sees the connection end, the supervisor writes the last error line down and starts a new
process.

    python -m ultraflash.server.worker --parent PID      (the supervisor's doing)
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from ultraflash.graphs.errors import GraphError
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling, Step
from ultraflash.runtime.errors import DeviceError, EngineError, RequestError
from ultraflash.server.config import ServerConfig
from ultraflash.server.exchange import Connection, Exchange
from ultraflash.server.log import configure_logging
from ultraflash.server.messages import (
    Abort,
    Opened,
    Opening,
    Refused,
    StepOf,
    Steps,
    Submit,
    ToEngine,
    unpack_ids,
)
from ultraflash.server.processes import die_with_parent
from ultraflash.server.supervisor import LOST, REFUSED, UNAVAILABLE

_log = logging.getLogger("ultraflash.server.worker")  # also when run as __main__

Progress = Callable[[int, int], None]


class EngineLike(Protocol):
    """What this file needs of an engine; `ultraflash.runtime.Engine` has it."""

    fingerprint: str
    max_seq: int

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""

    def submit(self, key: str, request: Generation) -> None:
        """Queue a request; RequestError when it can never run."""

    def cancel(self, key: str) -> None:
        """Forget a request."""

    def step(self) -> list[Step]:
        """One unit of work."""

    def close(self) -> None:
        """Give everything back."""


OpenEngine = Callable[[RuntimeConfig, Progress], EngineLike]


class EngineLoop:
    """Steps the engine while there is work and hands messages to it in between."""

    def __init__(self, engine: EngineLike, exchange: Exchange) -> None:
        """The engine is open; nothing runs yet."""
        self._engine, self._exchange = engine, exchange
        self._owners: dict[str, Connection] = {}
        self._number = 0
        self._stopping = False

    def stop(self) -> None:
        """End `run` after the present step; safe in a signal handler."""
        self._stopping = True
        self._exchange.wake()

    def run(self) -> None:
        """Work until `stop`; waits, without spinning, while there is nothing to do."""
        while not self._stopping:
            received = self._exchange.receive(wait=not self._engine.has_work)
            while received is not None:
                if received.connection is not None:
                    self._handle(received.connection, received.message)
                received = self._exchange.receive(wait=False)
            if self._engine.has_work and not self._stopping:
                self._step()

    def _handle(self, connection: Connection, message: ToEngine | None) -> None:
        match message:
            case Submit():
                self._submit(connection, message)
            case Abort(key):
                # Only its owner may end a request: keys are chosen by the HTTP processes.
                if self._owners.get(key) is connection:
                    del self._owners[key]
                    self._engine.cancel(key)
            case None:
                for key in [k for k, owner in self._owners.items() if owner is connection]:
                    del self._owners[key]
                    self._engine.cancel(key)

    def _submit(self, connection: Connection, message: Submit) -> None:
        key = message.key
        if key in self._owners:
            connection.post(Refused(key, "id", "this request id is in use already"))
            return
        try:
            self._engine.submit(key, _generation(message))
        except RequestError as error:
            connection.post(Refused(key, error.field, error.message))
        else:
            self._owners[key] = connection

    def _step(self) -> None:
        steps = self._engine.step()
        self._number += 1
        items: defaultdict[Connection, list[StepOf]] = defaultdict(list)
        for step in steps:
            owner = self._owners.get(step.key)
            if owner is None:
                continue  # aborted while this step ran
            items[owner].append(_step_of(step))
            if step.finish is not None:
                del self._owners[step.key]
        # A prefill chunk moves no request, yet who waits must see that the engine is alive.
        for owner in {*self._owners.values(), *items}:
            owner.post(Steps(self._number, items.get(owner, [])))


def _generation(message: Submit) -> Generation:
    return Generation(
        ids=unpack_ids(message.ids),
        max_tokens=message.max_tokens,
        sampling=Sampling(message.temperature, message.top_p, message.top_k, message.seed),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
    )


def _step_of(step: Step) -> StepOf:
    return StepOf(
        step.key,
        list(step.tokens),
        step.finish,
        step.prompt_tokens,
        step.cached_tokens,
        step.prefill_ms,
        step.decode_ms,
        step.rows,
    )


def main(argv: Sequence[str] | None = None, open_engine: OpenEngine = Engine.open) -> int:
    """Run until SIGTERM; `open_engine` lets tests drive another engine."""
    parser = argparse.ArgumentParser(prog="python -m ultraflash.server.worker")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    die_with_parent(parser.parse_args(argv).parent)
    faulthandler.enable()
    threading.excepthook = _end_process
    configure_logging()
    config = ServerConfig.from_env()
    exchange = Exchange(config.socket_path)
    try:
        engine = open_engine(_runtime_config(config), lambda *p: exchange.announce(Opening(*p)))
    except (EngineError, GraphError) as error:
        sys.stderr.write(f"error: {error}\n")
        return UNAVAILABLE if isinstance(error, DeviceError) else REFUSED
    loop = EngineLoop(engine, exchange)
    signal.signal(signal.SIGTERM, lambda signum, frame: loop.stop())
    exchange.announce(Opened(engine.fingerprint, engine.max_seq))
    _log.info("engine ready: context %d tokens, fingerprint %s", engine.max_seq, engine.fingerprint)
    try:
        loop.run()
    except EngineError as error:  # says what failed in one sentence, as a lost GPU does
        trace = "".join(traceback.format_tb(error.__traceback__))  # its last line would say it too
        sys.stderr.write(f"{trace}error: {error}\n")
        return LOST if isinstance(error, DeviceError) else 1
    engine.close()
    exchange.close()
    return 0


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """A deaf engine process is worse than none: end it, so that it is replaced."""
    kind = failure.exc_type.__name__
    traceback.print_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    sys.stderr.write(f"error: {kind}: {failure.exc_value}\n")
    sys.stderr.flush()
    os._exit(1)


def _runtime_config(config: ServerConfig) -> RuntimeConfig:
    return RuntimeConfig.from_env(
        checkpoint=config.checkpoint,
        world=config.world,
        max_sequences=config.max_sequences,
        max_seq=config.context,
    )


if __name__ == "__main__":
    raise SystemExit(main())
