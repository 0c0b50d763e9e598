"""The supervisor with children of one line, as a real process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.live_server import eventually
from ultraflash.server.config import ServerConfig
from ultraflash.server.processes import describe_exit
from ultraflash.server.status import Status, last_end, read_status

# Runs the supervisor with `python -c CHILD` as its only child; it is its own parent's child.
_MAIN = """
import sys
from ultraflash.server import supervisor
supervisor._PROVEN_S = 0.0
spec = supervisor.ChildSpec("engine", (sys.executable, "-c", sys.argv[1]))
raise SystemExit(supervisor.main(["--parent", sys.argv[2]], [spec]))
"""
_WAIT = "import signal; signal.pause()"
_BOUND = (
    "import sys; from ultraflash.server.processes import die_with_parent; "
    f"die_with_parent(int(sys.argv[2])); {_WAIT}"
)


class Supervised:
    def __init__(self, folder: Path, child: str, parent: int | None = None) -> None:
        folder.mkdir()
        self.config = ServerConfig(run_dir=folder)
        argv = [sys.executable, "-c", _MAIN, child, str(parent or os.getpid())]
        self.process = subprocess.Popen(
            argv, env=self.config.environment(), stderr=subprocess.PIPE, text=True
        )

    def status(self, check: Callable[[Any], bool]) -> Any:
        """The child's status, once it satisfies `check`."""

        def read() -> Any:
            status = read_status(self.config.status_path)
            child = status.children["engine"] if status else None
            return child if child is not None and check(child) else None

        return eventually(read)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[[str], Supervised]]:
    started: list[Supervised] = []

    def start(child: str) -> Supervised:
        started.append(Supervised(tmp_path / f"run{len(started)}", child))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.stop()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_killed_child_comes_back_and_the_status_says_why(
    supervised: Callable[[str], Supervised],
) -> None:
    supervisor = supervised(_WAIT)
    first = supervisor.status(lambda s: s.state == "running")
    assert (first.restarts, last_end(first)) == (0, None)
    os.kill(first.pid, signal.SIGKILL)
    second = supervisor.status(lambda s: s.state == "running" and s.pid != first.pid)
    assert (second.restarts, last_end(second)) == (1, "killed by signal 9 (SIGKILL)")


def test_the_last_error_line_is_kept_and_passed_on(
    supervised: Callable[[str], Supervised],
) -> None:
    supervisor = supervised("print('fine'); raise RuntimeError('no \\u20ac left')")
    ended = supervisor.status(lambda s: s.exit is not None)
    assert last_end(ended) == "exit status 1: RuntimeError: no \u20ac left"
    supervisor.process.terminate()
    _, stderr = supervisor.process.communicate(timeout=30)
    assert "RuntimeError: no \u20ac left" in stderr
    assert "the engine process ended (exit status 1); starting it again in 0.2 s" in stderr


def test_an_explicit_error_line_wins_over_what_follows_it(
    supervised: Callable[[str], Supervised],
) -> None:
    text = "error: 2 tensors are missing:\\n  a\\n  b"
    supervisor = supervised(f"import sys; sys.exit('{text}')")
    ended = supervisor.status(lambda s: s.exit is not None)
    assert ended.error == "2 tensors are missing:"


@pytest.fixture
def asked() -> Iterator[list[int]]:
    """The signals by which the supervisor asked its parent, which is this process, to stop."""
    signals: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda signum, frame: signals.append(signum))
    yield signals
    signal.signal(signal.SIGINT, previous)


def test_a_child_that_refuses_is_not_started_again(
    supervised: Callable[[str], Supervised], asked: list[int]
) -> None:
    child = "import sys; sys.stderr.write('error: bad shard\\n'); sys.exit(78)"
    supervisor = supervised(child)
    refused = supervisor.status(lambda s: s.state == "refused")
    assert last_end(refused) == "exit status 78: bad shard"
    eventually(lambda: asked)
    assert asked == [signal.SIGINT], "its parent is asked to stop, once"


# Exits with the statuses that the file names, one a start; each time it says so in one line.
_SCRIPT = (
    "import sys, pathlib; path = pathlib.Path({path!r}); "
    "(code, text), *rest = eval(path.read_text()); path.write_text(repr(rest)); "
    "sys.stderr.write(f'error: {{text}}\\n'); sys.exit(code)"
)


def script(folder: Path, *ends: tuple[int, str]) -> str:
    path = folder / "ends"
    path.write_text(repr([*ends]))
    return _SCRIPT.format(path=str(path))


def test_a_device_at_fault_is_tried_again_ever_later_and_told_once(
    supervised: Callable[[str], Supervised], asked: list[int], tmp_path: Path
) -> None:
    """However long a try took: a GPU is found full behind minutes of loading."""
    full, gone = (69, "GPU 0 is full"), (69, "GPU 0 is gone")
    supervisor = supervised(script(tmp_path, full, full, gone, full, (78, "bad shard")))
    waiting = supervisor.status(lambda s: s.device and s.state == "waiting")
    assert last_end(waiting) == "GPU 0 is full"
    refused = supervisor.status(lambda s: s.state == "refused")
    assert (refused.restarts, refused.device) == (4, False), "settings fail whenever they are read"
    assert last_end(refused) == "exit status 78: bad shard"
    eventually(lambda: asked)
    supervisor.process.terminate()
    _, stderr = supervisor.process.communicate(timeout=30)
    said = [line for line in stderr.splitlines() if line.startswith("error: ")]
    texts = ["GPU 0 is full", "GPU 0 is gone", "GPU 0 is full", "bad shard"]
    assert said == [f"error: {text}" for text in texts]
    assert re.findall(r"again in (\S+) s and later, without a word", stderr) == [
        "0.2", "0.8", "1.6"
    ]  # fmt: skip


def test_what_has_run_is_started_again_whatever_it_says(
    supervised: Callable[[str], Supervised], tmp_path: Path
) -> None:
    supervisor = supervised(script(tmp_path, (74, "GPU 0 is lost"), (78, "no shard"), (69, "none")))
    ended = supervisor.status(lambda s: s.restarts == 1)
    assert (last_end(ended), ended.device) == ("GPU 0 is lost", True)
    ended = supervisor.status(lambda s: s.restarts == 2)
    assert (last_end(ended), ended.device) == ("exit status 78: no shard", False)
    assert supervisor.status(lambda s: s.restarts == 3).device


def test_a_line_without_an_end_is_passed_on(supervised: Callable[[str], Supervised]) -> None:
    supervisor = supervised("import sys; sys.stderr.write('x' * 10_000 + 'y'); sys.exit(3)")
    supervisor.status(lambda s: s.exit is not None)
    supervisor.process.terminate()
    _, stderr = supervisor.process.communicate(timeout=30)
    assert "".join(stderr.split("supervisor:")[0].split()) == "x" * 10_000 + "y"


def test_it_ends_with_its_parent_and_takes_its_child_along(tmp_path: Path) -> None:
    go_between = (
        "import subprocess, sys, os\n"
        "argv = [sys.executable, '-c', sys.argv[1], sys.argv[2], str(os.getpid())]\n"
        "print(subprocess.Popen(argv).pid, flush=True)\n"
        "import signal; signal.pause()\n"
    )
    config = ServerConfig(run_dir=tmp_path)
    parent = subprocess.Popen(
        [sys.executable, "-c", go_between, _MAIN, _WAIT],
        env=config.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    supervisor = int(parent.stdout.readline())
    child = eventually(lambda: running_child(config))
    parent.kill()
    parent.communicate()
    eventually(lambda: not is_alive(supervisor) and not is_alive(child))
    assert not config.status_path.exists()


def running_child(config: ServerConfig) -> int | None:
    status = read_status(config.status_path)
    return status.children["engine"].pid if status else None


def test_a_killed_supervisor_leaves_no_child(supervised: Callable[[str], Supervised]) -> None:
    supervisor = supervised(_BOUND)
    child = supervisor.status(lambda s: s.state == "running").pid
    supervisor.process.kill()
    eventually(lambda: not is_alive(child))


def test_sigterm_ends_children_that_ignore_it(supervised: Callable[[str], Supervised]) -> None:
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print('x'); signal.pause()"
    supervisor = supervised(stubborn)
    child = supervisor.status(lambda s: s.state == "running").pid
    supervisor.process.terminate()
    assert supervisor.process.wait(30) == 0
    assert not is_alive(child)
    assert not supervisor.config.status_path.parent.exists()


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-11) == "killed by signal 11 (SIGSEGV)"
    assert describe_exit(-63) == "killed by signal 63"


def test_half_a_status_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    path.write_text('{"supervisor": 1, "chil')
    assert read_status(path) is None
    path.write_text(json.dumps({"supervisor": 1, "children": {}}))
    assert read_status(path) == Status(1, {})
