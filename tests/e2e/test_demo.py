"""`make demo` as somebody sees it: the real server, an answer, an end that leaves no process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "ultraflash.tools.demo"]
GREEDY = "--temperature", "0"  # a drawn token may be the end


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A word in the environment of everything that the demo starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # logs of servers that failed or were killed
    return f"demo-{uuid.uuid4().hex}"


def _start(mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, "UF_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _living(mark: str) -> list[str]:
    """Command lines of the processes that carry the mark and are not zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return [command for command in found if command]


def test_an_answer_one_summary_line_and_no_process_left(mark: str) -> None:
    out, err = _start(mark, "--max-tokens", "24", *GREEDY).communicate(timeout=120)
    assert err == ""
    summary = r"24 tokens, [\d.]+ tokens/s, first token after \d+ ms \(ended by length\)"
    assert re.fullmatch(summary, out.splitlines()[-1])
    assert _living(mark) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_interrupted_it_leaves_no_process(mark: str, number: int, status: int) -> None:
    process = _start(mark, "--max-tokens", "4000", *GREEDY)
    assert process.stdout is not None
    assert "server ready" in process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    assert _living(mark) == []


def test_killed_it_takes_its_server_along(mark: str) -> None:
    process = _start(mark, "--max-tokens", "4000", *GREEDY)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 15
    while (left := _living(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_server_that_cannot_start_is_one_sentence(mark: str, tmp_path: Path) -> None:
    out, err = _start(mark, "--checkpoint", str(tmp_path)).communicate(timeout=60)
    assert err.startswith("demo: ")
    assert str(tmp_path) in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err
    assert _living(mark) == []
