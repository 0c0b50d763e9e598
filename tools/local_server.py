"""A server of ours as a child process: started on a free port, awaited, measured, always ended.

For the demo, the benchmark and end-to-end tests. It knows the command line and `/readyz`, nothing
of what the server does inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_LISTENING = re.compile(r"listening on (http://\S+:\d+)")
_STOP_SECONDS = 15.0  # an idle server needs well under one; past this it is killed
_PR_SET_PDEATHSIG = 1


class ServerError(Exception):
    """The server did not start, did not become ready, or could not be asked."""


class Process(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: int


class LocalServer:
    """`python -m ultraflash.server` with `arguments`, from `with` to the end of the block.

    `command` is for tests: something else that takes `--port 0`, prints `listening on http://…` and
    serves `/readyz`.
    """

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = (sys.executable, "-m", "ultraflash.server"),
        switches: Mapping[str, str] | None = None,
    ) -> None:
        """`switches`: UF_... variables on top of this process's environment."""
        self._arguments = arguments
        # `env` puts them there: no file but the two configurations reads the environment.
        named = [f"{name}={value}" for name, value in (switches or {}).items()]
        self._command = ["/usr/bin/env", *named, *command] if named else list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self.url = ""  # base address without `/v1`, known once the server listens
        self.log = Path()

    def __enter__(self) -> LocalServer:
        """Start the server; `wait_ready` tells when it can be used."""
        handle, name = tempfile.mkstemp(prefix="ultraflash-server-", suffix=".log")
        self.log = Path(name)
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [*self._command, "--port", "0", "--drain-seconds", "0", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle; the session also marks its family
            preexec_fn=_die_with_parent,
        )
        os.close(handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process of the server; the log stays only when the block failed."""
        self.stop()
        if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit):
            self.log.unlink(missing_ok=True)

    def wait_ready(
        self, timeout: float = 60.0, waiting: Callable[[str], None] | None = None
    ) -> float:
        """Seconds from the start until `/readyz` answered 200.

        `waiting` is called with the reason that `/readyz` gives whenever that changes.

        Raises:
            ServerError: when the server ends first, or is not ready after `timeout` seconds.
        """
        assert self._process is not None, "wait_ready outside the with block"
        reason = ""
        while True:
            ready, now = self._readiness()
            if ready:
                return time.monotonic() - self._started
            if now != reason:
                reason = now
                if waiting is not None:
                    waiting(reason)
            status = self._process.poll()
            if status is not None:
                raise ServerError(
                    f"the server ended with status {status} before it was ready: "
                    f"{self.last_words()} (whole log: {self.log})"
                )
            if time.monotonic() - self._started > timeout:
                raise ServerError(
                    f"the server was not ready after {timeout:g} s: {reason} (log: {self.log})"
                )
            time.sleep(0.05)

    def _readiness(self) -> tuple[bool, str]:
        if not self.url:
            listening = _LISTENING.search(self.log.read_text(errors="replace"))
            if listening is None:
                return False, "the server does not listen yet"
            self.url = listening[1]
        return readiness(self.url)

    def last_words(self) -> str:
        """The last line of the server's log that says something."""
        lines = self.log.read_text(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return last.removeprefix("error: ")

    def processes(self) -> list[Process]:
        """Every living process of the server: its session and all descendants."""
        if self._process is None:
            return []
        return _family(self._process.pid)

    def memory_bytes(self) -> int:
        """Memory of all its processes; a page shared by two of them counts once."""
        return sum(_pss_bytes(process.pid) for process in self.processes())

    def stop(self) -> None:
        """Ask the server to end, wait, and kill what is left."""
        if self._process is None:
            return
        family = self.processes()
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        while any(map(_alive, family)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in filter(_alive, family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        while any(map(_alive, family)):
            time.sleep(0.002)
        self._process.wait()
        self._process = None


def readiness(url: str) -> tuple[bool, str]:
    """Whether the server at `url` is ready, and if not, the reason in its own words."""
    try:
        status, body = get(url, "/readyz", timeout=5.0)
    except ServerError as error:
        return False, str(error)
    return status == 200, _reason(body) or f"/readyz answered {status}"


def get(url: str, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
    """Status and body of one GET.

    Raises:
        ServerError: when nobody answers.
    """
    connection = connect(url, timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{url} does not answer ({error})") from error
    finally:
        connection.close()


def connect(url: str, timeout: float) -> http.client.HTTPConnection:
    """A connection to the host and port of `url`, not yet opened.

    Raises:
        ServerError: when `url` is no http address.
    """
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rstrip("/").partition(":")
    if scheme != "http" or not host or not (port.isdigit() or not port):
        raise ServerError(f"{url!r} is no address like http://127.0.0.1:8000")
    return http.client.HTTPConnection(host, int(port or 80), timeout=timeout)


def _reason(body: bytes) -> str:
    """What a `/readyz` body says: a JSON `reason`, `status` or `error.message`, else its text."""
    try:
        value = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:300]
    if isinstance(value, dict):
        if isinstance(error := value.get("error"), dict):
            value = {**value, "reason": error.get("message")}
        for key in ("reason", "status"):
            if isinstance(value.get(key), str):
                return str(value[key])
    return str(value)[:300]


def _die_with_parent() -> None:
    """In the child before exec: end it when we are killed without a chance to end it ourselves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stat(pid: int) -> tuple[int, int, int, str] | None:
    """(parent, session, start time, state letter) of a process, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return int(fields[1]), int(fields[3]), int(fields[19]), fields[0]


def _family(root: int) -> list[Process]:
    found = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    living = {pid: stat for pid, stat in found.items() if stat is not None and stat[3] != "Z"}

    def belongs(pid: int) -> bool:
        while pid in living:
            parent, session, _, _ = living[pid]
            if pid == root or session == root:
                return True
            pid = parent
        return False

    return [Process(pid, stat[2]) for pid, stat in living.items() if belongs(pid)]


def _alive(process: Process) -> bool:
    stat = _stat(process.pid)
    return stat is not None and stat[2] == process.started and stat[3] != "Z"


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0")
    return int(line.split()[1]) * 1024
