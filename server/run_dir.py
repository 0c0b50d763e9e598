"""The private directory in which a server's processes meet, and how it goes away again.

Whoever serves from it holds a shared lock on one of its files. The kernel drops locks with their
processes, however they end and whatever pid namespace they are in, so a directory whose lock can be
had is left over: the next server removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

SOCKET, STATUS, DRAINING = "engine.sock", "status.json", "draining"
_LOCK = "lock"
_FILES = (SOCKET, STATUS, Path(STATUS).with_suffix(".new").name, DRAINING, _LOCK)
_PREFIX = "ultraflash-"


def make_run_dir() -> Path:
    """A new directory, held by this process and what it executes; leftovers of others are removed.

    Raises:
        OSError: when there is no place for it.
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    # Under its own name only once it is held: who looks for leftovers must not see it before.
    draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    hold_run_dir(draft)
    return draft.rename(draft.with_name(draft.name.removeprefix(".")))


def hold_run_dir(folder: Path) -> None:
    """Let nobody take a directory for a leftover while this process lives, or what it executes.

    Raises:
        OSError: when it is gone, or being removed.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.set_inheritable(lock, True)


def remove_run_dir(folder: Path) -> None:
    """Remove what a server put there, and the directory if nothing else is in it."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # no directory of ours, in use, or just removed
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_run_dir(folder)
            finally:
                os.close(lock)
