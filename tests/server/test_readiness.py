from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import pytest

from ultraflash.server import readiness
from ultraflash.server.errors import ServerError, Unready
from ultraflash.server.link import Link, LinkState
from ultraflash.server.messages import Opened, Opening
from ultraflash.server.readiness import Gate, Readiness
from ultraflash.server.status import ChildStatus, Status, write_status

OPENED = Opened("f", 10)


class FakeLink:
    def __init__(self) -> None:
        self.state = LinkState(None, None, 0, 0.0)
        self.failed: list[ServerError] = []

    def fail_all(self, error: ServerError) -> None:
        self.failed.append(error)


class Setting:
    def __init__(self, folder: Path) -> None:
        self.link = FakeLink()
        self._folder = folder
        self.gate = Gate(cast(Link, self.link), folder / "status.json", folder / "draining")

    def child(self, status: ChildStatus) -> None:
        write_status(self._folder / "status.json", Status(1, {"engine": status}))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_starting_and_its_progress(setting: Setting) -> None:
    assert setting.gate.check().reason == "the engine process is starting"
    setting.link.state = LinkState(None, Opening(12_000_000, 40_000_000), 0, 0.0)
    now = setting.gate.check()
    assert (now.status, now.reason) == ("starting", "the engine loads weights (12 of 40 MB)")
    with pytest.raises(Unready, match="loads weights"):
        setting.gate.require()
    setting.link.state = LinkState(None, Opening(40_000_000, 40_000_000), 0, 0.0)
    with pytest.raises(Unready, match=r"has its weights \(40 MB\) and makes its plans ready"):
        setting.gate.require()


def test_a_dead_engine_and_its_successor(setting: Setting) -> None:
    setting.child(ChildStatus("waiting", None, 1, "exit status 1", "RuntimeError: no"))
    now = setting.gate.check()
    assert now.status == "restarting"
    assert now.reason is not None
    assert now.reason.endswith("is started again soon: exit status 1: RuntimeError: no")
    setting.child(ChildStatus("running", 7, 1, "killed by signal 9 (SIGKILL)", None))
    now = setting.gate.check()
    assert now.status == "starting"
    assert now.reason == (
        "the engine process is starting; the one before ended: killed by signal 9 (SIGKILL)"
    )
    setting.link.state = LinkState(None, None, 0, 0.0, lost_pid=7)
    now = setting.gate.check()
    assert now.status == "restarting"
    assert now.reason == (
        "the engine process 7 has just ended; the one before ended: killed by signal 9 (SIGKILL)"
    )
    setting.child(ChildStatus("refused", None, 0, "exit status 78", "bad shard"))
    assert setting.gate.check().status == "failed"


def test_a_device_at_fault_is_told_in_its_own_words(setting: Setting) -> None:
    child = partial(ChildStatus, exit="exit status 69", error="GPU 0 is full", device=True)
    setting.child(child("waiting", None, 3))
    assert setting.gate.check() == Readiness("unavailable", "GPU 0 is full")
    with pytest.raises(Unready, match="GPU 0 is full"):
        setting.gate.require()
    setting.child(child("running", 7, 3))
    assert setting.gate.check() == Readiness("unavailable", "GPU 0 is full"), "until it gets on"
    setting.link.state = LinkState(None, Opening(12_000_000, 40_000_000), 0, 0.0)
    now = setting.gate.check()
    assert now.status == "starting"
    assert now.reason == (
        "the engine loads weights (12 of 40 MB); the one before ended: GPU 0 is full"
    )
    setting.link.state = LinkState(None, None, 0, 0.0, lost_pid=7)
    now = setting.gate.check()
    assert now.status == "restarting"
    assert now.reason == (
        "the engine process 7 has just ended; the one before ended: GPU 0 is full"
    )


def test_ready_stalled_and_long_waits_without_requests(setting: Setting) -> None:
    setting.link.state = LinkState(OPENED, None, 0, 0.0)
    assert setting.gate.check().ready
    setting.gate.require()
    setting.link.state = LinkState(OPENED, None, 2, readiness._STALL_S + 1)
    now = setting.gate.check()
    assert (now.status, now.ready) == ("stalled", False)
    assert now.reason == "2 requests wait and the engine made no step for 31 s"
    setting.gate.require()


def test_draining_by_file_and_by_word(setting: Setting, tmp_path: Path) -> None:
    setting.link.state = LinkState(OPENED, None, 0, 0.0)
    (tmp_path / "draining").touch()
    assert setting.gate.check().status == "draining"
    (tmp_path / "draining").unlink()
    setting.gate.drain(0.0)
    assert setting.gate.check().status == "draining"
    with pytest.raises(Unready, match="stopping"):
        setting.gate.require()
