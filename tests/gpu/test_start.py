"""How long kernels take to be there: compiled into an empty cache, then found in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.device import REHEARSAL, report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REHEARSAL, reason="the interpreter compiles nothing"),
]
COLD_S, WARM_S, THREADS = 15.0, 1.0, 8
_LINE = re.compile(
    r"(\d+) kernels for sm_\w+: (\d+) compiled, (\d+) from .*? in ([\d.]+) s with 8 threads; "
    r"all again from there in ([\d.]+) s"
)


def test_kernels_are_compiled_and_found_in_time(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ultraflash.tools.capture_graphs", "--threads", str(THREADS)]
    done = subprocess.run(
        [*command, "--rows", "1..8", "--sequences", "1..3"], capture_output=True, text=True,
        check=False, env={**os.environ, "UF_CACHE_DIR": str(tmp_path), "COLUMNS": "400"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = _LINE.search(done.stdout)
    assert found, done.stdout
    report(found[0])
    total, fresh, cached = (int(found[n]) for n in (1, 2, 3))
    assert (fresh, cached) == (total, 0), "the cache was empty"
    if (os.cpu_count() or 1) >= THREADS:
        assert float(found[4]) <= COLD_S
    assert float(found[5]) <= WARM_S
