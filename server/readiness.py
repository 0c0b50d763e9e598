"""Whether this server may be sent requests, and if not, why: what `/readyz` and each 503 say."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ultraflash.server.errors import EngineLost, Unready
from ultraflash.server.link import Link
from ultraflash.server.status import ChildStatus, last_end, read_status

_STALL_S = 30.0


@dataclass(frozen=True)
class Readiness:
    """`status` is ready, starting, restarting, failed, stalled, draining, or unavailable: a device
    is at fault, `reason` is its sentence, and the engine is tried again and again.
    """

    status: str
    reason: str | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may come."""
        return self.status == "ready"


class Gate:
    """Knows the state of the engine process, its supervisor and the drain."""

    def __init__(self, link: Link, status_path: Path, draining_path: Path) -> None:
        """Reads the two files when asked; writes neither."""
        self._link, self._status_path, self._draining_path = link, status_path, draining_path
        self._draining = False
        self._drains: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._end_streams, name="drain", daemon=True)

    def start(self) -> None:
        """Be ready to drain."""
        self._thread.start()

    def check(self) -> Readiness:
        """How it stands now."""
        if self._draining or self._draining_path.exists():
            return Readiness("draining", "the server is stopping and takes no more requests")
        state = self._link.state
        if state.opened is None:
            return self._not_open()
        if state.pending and state.quiet_s > _STALL_S:
            seconds = f"{state.quiet_s:.0f} s"
            text = f"{state.pending} requests wait and the engine made no step for {seconds}"
            return Readiness("stalled", text)
        return Readiness("ready")

    def require(self) -> None:
        """Let a request pass.

        Raises:
            Unready: with the reason, when it may not.
        """
        now = self.check()
        if not now.ready and now.status != "stalled":  # who may hang up may also wait
            raise Unready(f"the server is not ready: {now.reason}")

    def drain(self, stop_streams_after_s: float) -> None:
        """Take no more requests; streams that still run after that time get an error event.

        Called by a signal handler, which must neither start a thread nor wait for a lock.
        """
        self._draining = True
        self._drains.put(stop_streams_after_s)

    def _end_streams(self) -> None:
        time.sleep(self._drains.get())
        text = "the server stops and this answer did not end in time; send it again"
        self._link.fail_all(EngineLost(text))

    def _not_open(self) -> Readiness:
        status = read_status(self._status_path)
        child = status.children.get("engine") if status else None
        if child is None:
            return Readiness("starting", self._progress(None))
        if child.state == "refused":
            return Readiness("failed", f"the engine process cannot run: {last_end(child)}")
        if child.state == "waiting":
            if child.device:
                return Readiness("unavailable", last_end(child))
            text = f"the engine process ended and is started again soon: {last_end(child)}"
            return Readiness("restarting", text)
        if child.pid is not None and child.pid == self._link.state.lost_pid:
            # The supervisor has not noticed yet.
            text = f"the engine process {child.pid} has just ended"
            return Readiness("restarting", _with_earlier_end(text, child))
        if child.device and self._link.state.progress is None:  # a try that got no further yet
            return Readiness("unavailable", last_end(child))
        return Readiness("starting", self._progress(child))

    def _progress(self, child: ChildStatus | None) -> str:
        progress = self._link.state.progress
        text = "the engine process is starting"
        if progress is not None and progress.total_bytes:
            done, total = (n / 1e6 for n in (progress.done_bytes, progress.total_bytes))
            text = f"the engine loads weights ({done:.0f} of {total:.0f} MB)"
            if done == total:
                text = f"the engine has its weights ({total:.0f} MB) and makes its plans ready"
        return _with_earlier_end(text, child)


def _with_earlier_end(text: str, child: ChildStatus | None) -> str:
    ended = last_end(child)
    return f"{text}; the one before ended: {ended}" if ended else text
