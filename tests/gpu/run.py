"""The device tests without the house's pytest settings, for machines that lack its plugins.

    python tests/gpu/run.py [--quick] [--rehearse] [pytest's arguments]

`--quick`: short sizes. `--rehearse`: on the interpreter, where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def name_the_rooms() -> None:
    """Make `ultraflash` importable where it is not installed, as links to the rooms."""
    if importlib.util.find_spec("ultraflash"):
        return
    names = Path(tempfile.mkdtemp(prefix="rooms-"))
    (names / "ultraflash").mkdir()
    for room in ("ptx", "graphs", "runtime", "server", "tools"):
        (names / "ultraflash" / room).symlink_to(ROOT / room)
    sys.path.insert(0, str(names))
    # Programs that tests start need it too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(names), os.environ.get("PYTHONPATH", "")])


def main(arguments: list[str]) -> int:
    """Exit status of pytest."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "4")
    for option, variable in (("--quick", "UF_GPU_QUICK"), ("--rehearse", "UF_GPU_REHEARSAL")):
        if option in arguments:
            arguments.remove(option)
            os.environ[variable] = "1"
    name_the_rooms()
    sys.path.insert(0, str(ROOT / "tests"))
    os.chdir(ROOT)

    import pytest

    from helpers import devices

    if os.environ.get("UF_GPU_REHEARSAL") == "1":
        devices.num_gpus = lambda: 1  # type: ignore[assignment]
    else:
        os.environ["UF_REQUIRE_GPU"] = "1"
    if not any(a.startswith("tests") for a in arguments):
        arguments += ["tests/gpu", "tests/runtime/test_reuse.py"]
    options = ["-o", "addopts=", "-o", "filterwarnings=", "-o", "timeout=0"]
    options += ["-p", "no:cacheprovider", "--import-mode=importlib", "-ra", "--durations=15"]
    return int(pytest.main([*options, "-m", "gpu", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
