"""Processes that never outlive their parent, and how one ends another. Standard library only.

gunicorn's master reaps every child and throws the exit status away, so a child is held by a pidfd,
which stays valid (and never names another process) after that.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Let the kernel send `signum` to this process when `parent` ends, or now if it has.

    NOTE: the kernel watches the *thread* that started this process, so children must be started
    from a main thread.

    Raises:
        OSError: when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signum)


class Child:
    """A process in a session of its own: Ctrl-C reaches gunicorn alone, which ends the rest."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, stderr: int | None = None
    ) -> None:
        """Start it.

        Raises:
            OSError: when it cannot be started.
        """
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        self._pidfd = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when it ends."""
        return self._pidfd

    def send(self, signum: int) -> None:
        """Send a signal; nothing happens when it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            return

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when that did not end it within `grace_s`."""
        self.send(signal.SIGTERM)
        if not self.wait(grace_s):
            self.send(signal.SIGKILL)
            self.wait(5.0)

    def close(self) -> int:
        """Forget an ended process; its return code (nonsense where somebody else reaps)."""
        os.close(self._pidfd)
        return self.process.wait()


def describe_exit(returncode: int) -> str:
    """Words for a return code as `subprocess` gives it."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        return f"killed by signal {-returncode}"
    return f"killed by signal {-returncode} ({name})"
