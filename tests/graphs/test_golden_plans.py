"""Plans of the tiny model against their golden text (helpers/golden_plans.py remakes it)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers import golden_plans

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", golden_plans.PLANS)
def test_plan_is_what_the_golden_file_says(name: str) -> None:
    golden = (golden_plans.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert golden_plans.text(name) == golden, f"if this is meant: {golden_plans.REMAKE[2:]}"


def test_no_golden_plan_is_left_over() -> None:
    files = {path.stem for path in golden_plans.FOLDER.iterdir()}
    assert files == set(golden_plans.PLANS)


def test_the_command_of_the_first_line_writes_these_files(tmp_path: Path) -> None:
    script = golden_plans.REMAKE.split()[-1]
    subprocess.run([sys.executable, script, str(tmp_path)], cwd=ROOT, check=True)
    for name in golden_plans.PLANS:
        written = (tmp_path / f"{name}.txt").read_text(encoding="utf-8")
        assert written == golden_plans.text(name)
