from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ultraflash.server.config import ServerConfig
from ultraflash.server.errors import StartError
from ultraflash.server.run_dir import make_run_dir, remove_run_dir

_OWNER = """
import os, signal, sys
from ultraflash.server.run_dir import make_run_dir
print(make_run_dir(), flush=True)
# As the command line becomes gunicorn: another program, the same process.
os.execv(sys.executable, [sys.executable, "-c", "import signal; signal.pause()"])
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_killed_owner_leaves_a_directory_that_the_next_server_removes(temporary: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert folder.parent == temporary
    for name in ("status.json", "status.new", "draining", "engine.sock"):
        (folder / name).touch()
    mine = make_run_dir()
    assert folder.exists(), "its owner lives"
    owner.kill()
    owner.communicate()
    assert folder.exists(), "nobody could clean up"
    second = make_run_dir()
    assert not folder.exists()
    assert mine.exists(), "held by this process"
    assert {path.name for path in temporary.iterdir()} == {mine.name, second.name}


def test_what_is_none_of_ours_is_left_alone(temporary: Path) -> None:
    (temporary / "ultraflash-server-x.log").write_text("a log")
    for name in ("ultraflash-unlocked", "ultraflash-full"):
        (temporary / name).mkdir()
    (temporary / "ultraflash-full" / "lock").touch()
    (temporary / "ultraflash-full" / "thesis").touch()
    target = temporary / "elsewhere"
    target.mkdir()
    (target / "lock").touch()
    (temporary / "ultraflash-link").symlink_to(target)
    remove_run_dir(make_run_dir())
    assert sorted(path.name for path in temporary.iterdir()) == [
        "elsewhere", "ultraflash-full", "ultraflash-link", "ultraflash-server-x.log",
        "ultraflash-unlocked",
    ]  # fmt: skip
    assert (temporary / "ultraflash-full" / "thesis").exists()
    assert (target / "lock").exists()


def test_too_long_a_place_leaves_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(StartError, match="too long for a Unix socket"):
        ServerConfig().with_run_dir()
    assert not any(deep.iterdir())
