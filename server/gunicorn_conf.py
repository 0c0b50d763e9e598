"""gunicorn's settings: one worker with threads, and beside it a supervisor that keeps the engine.

    gunicorn -c python:ultraflash.server.gunicorn_conf ultraflash.server.wsgi:app

Its master reads this file, so nothing heavy is imported here. Life and death: the supervisor is
executed, not forked, in a session of its own; supervisor and worker get a signal from the kernel
when the master ends.

On SIGTERM the server first says 503 on /readyz for `drain_s`, then stops taking connections and
gives the streams `graceful_s` to end. SIGINT (Ctrl-C) and SIGQUIT stop at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from ultraflash.server.config import ServerConfig
from ultraflash.server.errors import EngineLost, StartError
from ultraflash.server.log import configure_logging
from ultraflash.server.processes import Child, die_with_parent
from ultraflash.server.run_dir import remove_run_dir
from ultraflash.server.status import read_status

try:
    _config = ServerConfig.from_env().with_run_dir()
except StartError as error:
    raise SystemExit(f"error: {error}") from error
_config.export()

bind = _config.address
worker_class = "ultraflash.server.http_worker.HttpWorker"  # a gthread worker
workers = 1
threads = _config.threads
worker_connections = 2 * threads + 64  # fewer would refuse keep-alive while streams run
timeout = 120
graceful_timeout = int(_config.graceful_s)
keepalive = 75
preload_app = False
max_requests = 0
reuse_port = False
control_socket_disable = True
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
accesslog = None
loglevel = "warning"

_STOP_S = 5.0
_QUIT_S = 3.0
_LAST_WORDS_S = 5.0
_REFUSED, _SOFTWARE = 78, 70  # EX_CONFIG, EX_SOFTWARE
_supervisor: Child | None = None
_stopping = False
_log = logging.getLogger("ultraflash.server.gunicorn_conf")

supervisor_argv: tuple[str, ...] = (sys.executable, "-m", "ultraflash.server.supervisor")


def on_starting(arbiter: Any) -> None:
    """Execute the supervisor before anything listens."""
    global _supervisor
    configure_logging()
    _config.draining_path.unlink(missing_ok=True)
    argv = (*supervisor_argv, "--parent", str(os.getpid()))
    _supervisor = Child(argv, _config.environment())


def when_ready(arbiter: Any) -> None:
    """Put our drain in front of what gunicorn does on SIGTERM; its signals are set up by now."""

    def hand_on(signum: int, frame: Any) -> None:
        arbiter.signal(signal.SIGTERM, frame)

    def drain(signum: int, frame: Any) -> None:
        if _config.draining_path.exists():  # asked twice: no more waiting
            hand_on(signum, frame)
            return
        _config.draining_path.touch()
        signal.setitimer(signal.ITIMER_REAL, max(_config.drain_s, 1e-6))

    def child_ended(signum: int, frame: Any) -> None:
        if not _stopping and _supervisor is not None and _supervisor.wait(0):
            _log.error("the supervisor has ended and the engine with it: the server stops")
            arbiter.signal(signal.SIGQUIT, frame)
        arbiter.signal_chld(signum, frame)

    signal.signal(signal.SIGCHLD, child_ended)
    signal.signal(signal.SIGALRM, hand_on)
    signal.signal(signal.SIGTERM, drain)
    if _config.listen_fd is None:  # else the command line has said it
        _log.info("listening on %s", ", ".join(map(str, arbiter.LISTENERS)))


def post_fork(arbiter: Any, worker: Any) -> None:
    """In the worker process: end with the master."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    die_with_parent(worker.ppid)


def post_worker_init(worker: Any) -> None:
    """In the worker process, the application loaded: take part in its two ways to stop."""
    from gunicorn.workers.base import Worker

    from ultraflash.server.wsgi import current_server

    server = current_server()
    assert server is not None
    service = server.service

    def drain(signum: int, frame: Any) -> None:
        service.gate.drain(max(0.0, _config.graceful_s - _LAST_WORDS_S))
        worker.handle_exit(signum, frame)

    def stop(signum: int, frame: Any) -> None:
        # The kernel ends what is left then, such as a thread that writes to a slow reader.
        signal.setitimer(signal.ITIMER_REAL, _QUIT_S)
        service.link.fail_all(EngineLost("the server stops; send the request again"))
        # NOTE: not the handler of the gthread worker. It shuts its thread pool down, and waits for
        # ever for the pool's lock when the signal came while a request was being handed over.
        Worker.handle_quit(worker, signum, frame)

    signal.signal(signal.SIGTERM, drain)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.signal(signal.SIGQUIT, stop)
    signal.signal(signal.SIGINT, stop)


def on_exit(arbiter: Any) -> None:
    """Stop the engine; exit with an error when it could never run or lost its supervisor."""
    global _stopping
    _stopping = True
    status = read_status(_config.status_path)
    orphaned = _supervisor is None or _supervisor.wait(0)
    if _supervisor is not None:
        _supervisor.stop(_STOP_S)
    if orphaned:  # it was killed, and could not clean up
        remove_run_dir(_config.status_path.parent)
    if status and any(child.state == "refused" for child in status.children.values()):
        raise SystemExit(_REFUSED)
    if orphaned:
        raise SystemExit(_SOFTWARE)
