"""How tests of the device run: on which backend, and for how long.

UF_GPU_QUICK=1 takes the short sizes. A rehearsal (`python tests/gpu/run.py --rehearse`) runs the
same tests on the interpreter, short, so that they can be tried where there is no GPU.
"""

from __future__ import annotations

import os
import sys
from typing import TypeVar

T = TypeVar("T")

REHEARSAL = os.environ.get("UF_GPU_REHEARSAL") == "1"
QUICK = REHEARSAL or os.environ.get("UF_GPU_QUICK") == "1"
BACKEND = "numpy" if REHEARSAL else "cuda"
REPORT: list[str] = []  # measured figures, printed behind the tests' results


def sized(full: T, quick: T) -> T:
    """The size of this run."""
    return quick if QUICK else full


def count(name: str, full: int, quick: int) -> int:
    """A size that an environment variable may set."""
    return int(os.environ.get(name) or sized(full, quick))


def report(line: str) -> None:
    """A figure for docs/gpu_runs.md."""
    REPORT.append(line)
    sys.stderr.write(line + "\n")
