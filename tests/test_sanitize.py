"""How the output of compute-sanitizer is sorted out by steps (tests/gpu/sanitize.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CLEAN = """\
========= COMPUTE-SANITIZER
what comes first took 3.1 s
step of width 1 took 1.6 s
step of width 2 took 1.5 s
========= ERROR SUMMARY: 0 errors
"""
FOUND = """\
========= COMPUTE-SANITIZER
step of width 1 took 1.6 s
========= Invalid __global__ read of size 4 bytes
=========     at uf_linear+0x150
step of width 2 took 1.5 s
step of width 3 took 1.4 s
========= ERROR SUMMARY: 1 error
"""


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    path = Path(__file__).parent / "gpu" / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_a_clean_run(sanitize: ModuleType) -> None:
    found, rest = sanitize.sort_out(CLEAN)
    assert list(sanitize.report("memcheck", found, rest)) == [
        "memcheck width 1: clean, 1.6 s",
        "memcheck width 2: clean, 1.5 s",
    ]
    hazards = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed")
    assert sanitize.sort_out(hazards) == (found, [])


def test_a_finding_belongs_to_the_step_in_which_it_came(sanitize: ModuleType) -> None:
    found, rest = sanitize.sort_out(FOUND)
    assert list(sanitize.report("memcheck", found, rest)) == [
        "memcheck width 1: clean, 1.6 s",
        "memcheck width 2: found, 1.5 s",
        "    Invalid __global__ read of size 4 bytes",
        "    at uf_linear+0x150",
        "memcheck width 3: clean, 1.4 s",
        "memcheck at the end: ERROR SUMMARY: 1 error",
    ]
    assert rest, "the run as a whole fails"


@pytest.mark.parametrize(("tool", "status"), [("exit 0", 1), ("echo Device not supported", 0)])
def test_steps_that_did_not_end_are_told(
    sanitize: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str, status: int
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{tool}\n")
    program.chmod(0o755)
    assert sanitize._check(str(program), "memcheck", [1, 2]) == status
    out = capsys.readouterr().out
    assert ("no step of width 1, 2" in out) == (status == 1)
    assert ("nothing was checked" in out) == (status == 0)
