"""The status file: how the supervisor's children are, for `/readyz` and the exit status.

Written by the supervisor alone, whole and by rename, so that a reader never sees half of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["starting", "running", "waiting", "refused", "stopped"]


class ChildStatus(msgspec.Struct, frozen=True):
    """One child: `waiting` = it ended and will be started again; `refused` = it will not, ever.

    `exit` and `error` (its last error line) are of the process before this one, None if there was
    none. `device`: what `error` says is the fault of a device, which may get well.
    """

    state: State
    pid: int | None = None
    restarts: int = 0
    exit: str | None = None
    error: str | None = None
    device: bool = False


class Status(msgspec.Struct, frozen=True):
    """All children of one supervisor."""

    supervisor: int
    children: dict[str, ChildStatus]


def write_status(path: Path, status: Status) -> None:
    """Replace the file.

    Raises:
        OSError: when its directory is gone or full.
    """
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(status))
    os.replace(draft, path)


def read_status(path: Path) -> Status | None:
    """What was written last, None when nothing was."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError):
        return None


def last_end(child: ChildStatus | None) -> str | None:
    """How the previous process of a child ended, with its last error line; None when none has."""
    if child is None or child.exit is None:
        return None
    if child.device and child.error:
        return child.error  # a sentence for whoever asks; the exit status adds nothing
    return f"{child.exit}: {child.error}" if child.error else child.exit
