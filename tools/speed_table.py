"""Measurements as tables in the tree: one CSV a machine and program, a row a measurement."""

from __future__ import annotations

import csv
import datetime
import re
import subprocess
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tools" / "speed"
_MODULE = Path("/proc/driver/nvidia/version")


def append(path: Path, row: Any) -> None:
    """Add one row, a dataclass of plain values; a new file gets the header first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(row)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


def gpu_csv(gpu: str, what: str = "") -> Path:
    """The table of a GPU by its marketing name: "NVIDIA H200" has h200.csv."""
    words = re.findall(r"[a-z0-9]+", gpu.lower().removeprefix("nvidia"))
    return FOLDER / f"{'_'.join([words[0] if words else 'gpu', *([what] if what else [])])}.csv"


def csv_file(given: Path | Literal[True], gpu: str, what: str = "") -> Path:
    """The file that `--csv FILE` names, the GPU's own table for `--csv` alone."""
    return gpu_csv(gpu, what) if given is True else given


def commit() -> str:
    """What is measured: the checkout's commit, with -dirty where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def driver(cuda: int) -> str:
    """The driver's version as nvidia-smi says it, "580.159.04"; where the kernel does not tell, the
    newest CUDA that it knows, from `cuda`, 1,000 times its version: "CUDA 13.0".
    """
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)", _MODULE.read_text())
    except OSError:
        found = None
    return found[1] if found else f"CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
