"""The supervisor: starts the engine process, again when it ends, and writes down how it is.

gunicorn's master cannot do this: it reaps every child and loses the exit status, and it must never
hold a device. So `on_starting` executes this file as a process of its own. It knows nothing of
tensors or HTTP; a further child is one more `ChildSpec`.

When gunicorn ends, however it ends, the kernel sends SIGTERM here (and SIGKILL to each child when
this process ends), so no orphan keeps a device.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ultraflash.server.config import ServerConfig
from ultraflash.server.processes import Child, describe_exit, die_with_parent
from ultraflash.server.run_dir import hold_run_dir, remove_run_dir
from ultraflash.server.status import ChildStatus, Status, write_status

REFUSED = 78  # EX_CONFIG: the child will fail in the same way each time
UNAVAILABLE = 69  # EX_UNAVAILABLE: it cannot start on this machine as it is now
LOST = 74  # EX_IOERR: its device failed while it worked
_FIRST_DELAY_S, _LAST_DELAY_S = 0.2, 30.0
_PROVEN_S = 30.0  # a child that ran this long starts again without a longer delay
_STOP_GRACE_S = 3.0
_ERROR = b"error:"
_LONGEST_LINE = 1 << 12


@dataclass(frozen=True)
class ChildSpec:
    """A process to keep running; `argv` gets `--parent PID` added."""

    name: str
    argv: tuple[str, ...]


ENGINE = ChildSpec("engine", (sys.executable, "-m", "ultraflash.server.worker"))


@dataclass
class Keeper:
    """One child over its successive processes."""

    spec: ChildSpec
    config: ServerConfig
    child: Child | None = None
    started: float = 0.0
    next_start: float | None = 0.0
    status: ChildStatus = field(default_factory=lambda: ChildStatus("starting"))
    _delay_s: float = _FIRST_DELAY_S
    _has_run: bool = False
    _stderr: int = -1
    _tail: bytes = b""
    _error: bytes = b""
    _told: bytes = b""  # the error line of a start for want of a device: said once

    def start(self, selector: selectors.BaseSelector) -> None:
        """Start a process and watch its end and its stderr."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        argv = (*self.spec.argv, "--parent", str(os.getpid()))
        try:
            self.child = Child(argv, self.config.environment(), stderr=writer)
        finally:
            os.close(writer)
        self._stderr, self._tail, self._error = reader, b"", b""
        self.started, self.next_start = time.monotonic(), None
        selector.register(reader, selectors.EVENT_READ, lambda: self._read_stderr(selector))
        selector.register(self.child, selectors.EVENT_READ, lambda: self._ended(selector))
        self._update(state="running", pid=self.child.pid)

    def stop(self) -> None:
        """End the process for good."""
        self.next_start = None
        if self.child is not None:
            self.child.stop(_STOP_GRACE_S)
        self._update(state="stopped", pid=None)

    def _ended(self, selector: selectors.BaseSelector) -> None:
        assert self.child is not None
        selector.unregister(self.child)
        code = self.child.close()
        self.child = None
        self._read_stderr(selector)
        self._close_stderr(selector)
        exit_text, error = describe_exit(code), self._last_error()
        if code == REFUSED and not self._has_run:
            self._update(state="refused", pid=None, exit=exit_text, error=error, device=False)
            return
        self._has_run |= code not in (REFUSED, UNAVAILABLE)
        # A device may be found full after minutes of loading: that proves nothing.
        if code != UNAVAILABLE and time.monotonic() - self.started >= _PROVEN_S:
            self._delay_s = _FIRST_DELAY_S
        self.next_start = time.monotonic() + self._delay_s
        delay, self._delay_s = self._delay_s, min(2 * self._delay_s, _LAST_DELAY_S)
        restarts, device = self.status.restarts + 1, code in (UNAVAILABLE, LOST)
        self._update(
            state="waiting", pid=None, exit=exit_text, error=error, restarts=restarts, device=device
        )
        again = f"starting it again in {delay:g} s"
        if code != UNAVAILABLE:
            self._told = b""
        elif self._told != self._error:
            self._told = self._error
            again += " and later, without a word while the reason stays the same"
        else:
            return
        _say(f"the {self.spec.name} process ended ({exit_text}); {again}")

    def _read_stderr(self, selector: selectors.BaseSelector) -> None:
        """Pass the child's stderr on, line by line."""
        while self._stderr >= 0:
            try:
                data = os.read(self._stderr, 65536)
            except BlockingIOError:
                return
            if not data:
                self._close_stderr(selector)
                return
            *lines, self._tail = (self._tail + data).split(b"\n")
            for line in lines:
                self._take_line(line)
            if len(self._tail) > _LONGEST_LINE:
                self._take_line(self._tail)
                self._tail = b""

    def _take_line(self, line: bytes) -> None:
        """Remember the last line, or the last that says `error:`; forward all but repetitions."""
        text = line.strip()
        if text.startswith(_ERROR) or (text and not self._error.startswith(_ERROR)):
            self._error = text
        if not (text and text == self._told):
            _forward(line + b"\n")

    def _close_stderr(self, selector: selectors.BaseSelector) -> None:
        if self._tail:
            self._take_line(self._tail)
            self._tail = b""
        if self._stderr >= 0:
            selector.unregister(self._stderr)
            os.close(self._stderr)
            self._stderr = -1

    def _last_error(self) -> str | None:
        text = self._error.decode("utf-8", "replace").removeprefix("error:")
        return text.strip()[:1000] or None

    def _update(self, **changes: object) -> None:
        now = {name: getattr(self.status, name) for name in ChildStatus.__struct_fields__}
        self.status = ChildStatus(**{**now, **changes})


class Supervisor:
    """Keeps children running until it is told to stop or one of them refuses."""

    def __init__(self, config: ServerConfig, specs: Sequence[ChildSpec]) -> None:
        """Nothing is started yet."""
        self.config = config
        self.keepers = [Keeper(spec, config) for spec in specs]
        self._stopping = False

    def run(self, on_refused: Callable[[], None]) -> None:
        """Start the children and keep them until SIGTERM.

        `on_refused` is called once, when a child that has never run says that it never can; its
        last error line is in the status file by then.
        """
        refused = False
        with selectors.DefaultSelector() as selector:
            self._watch_signals(selector)
            while not self._stopping:
                now = time.monotonic()
                for keeper in self.keepers:
                    if keeper.next_start is not None and keeper.next_start <= now:
                        keeper.start(selector)
                self._write()
                if not refused and any(k.status.state == "refused" for k in self.keepers):
                    refused = True
                    on_refused()
                for key, _ in selector.select(self._timeout()):
                    key.data()
        for keeper in self.keepers:
            keeper.stop()
        self._write()

    def _watch_signals(self, selector: selectors.BaseSelector) -> None:
        waker, wakened = socket.socketpair()
        waker.setblocking(False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(waker.fileno())
        selector.register(wakened, selectors.EVENT_READ, lambda: wakened.recv(64))
        self._sockets = (waker, wakened)  # kept open while this object lives

    def _stop(self, signum: int, frame: object) -> None:
        self._stopping = True

    def _timeout(self) -> float | None:
        starts = [k.next_start for k in self.keepers if k.next_start is not None]
        return max(0.0, min(starts) - time.monotonic()) if starts else None

    def _write(self) -> None:
        children = {keeper.spec.name: keeper.status for keeper in self.keepers}
        write_status(self.config.status_path, Status(os.getpid(), children))


def _say(text: str) -> None:
    _forward(f"supervisor: {text}\n".encode())


def _forward(data: bytes) -> None:
    try:
        os.write(2, data)
    except OSError:
        return  # nobody reads our stderr any more: losing a log line must not end the engine


def main(argv: Sequence[str] | None = None, specs: Sequence[ChildSpec] = (ENGINE,)) -> int:
    """Run until gunicorn's master ends or says so, then remove the run directory."""
    parser = argparse.ArgumentParser(prog="python -m ultraflash.server.supervisor")
    parser.add_argument("--parent", type=int, required=True, help="process id of gunicorn's master")
    parent = parser.parse_args(argv).parent
    die_with_parent(parent, signal.SIGTERM)
    config = ServerConfig.from_env()
    hold_run_dir(config.status_path.parent)
    try:
        # SIGINT ends gunicorn at once and without a drain: nothing has been served.
        Supervisor(config, specs).run(lambda: os.kill(parent, signal.SIGINT))
    finally:
        remove_run_dir(config.status_path.parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
