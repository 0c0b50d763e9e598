"""Places of one stem: graphs/ops/<stem>.py, tests/ops/test_<stem>.py, ptx/<stem>.cu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPS = {p.stem for p in (ROOT / "graphs" / "ops").glob("*.py") if not p.stem.startswith("_")}


@pytest.mark.parametrize("stem", sorted(OPS))
def test_every_op_has_its_test(stem: str) -> None:
    assert (ROOT / "tests" / "ops" / f"test_{stem}.py").is_file()


def test_every_op_test_has_its_op() -> None:
    tested = {p.stem.removeprefix("test_") for p in (ROOT / "tests" / "ops").glob("test_*.py")}
    assert tested - OPS == set()


def test_every_kernel_has_its_op() -> None:
    """An architecture's own variant ends in _sm90 or _sm100 and belongs to the same op."""
    kernels = {re.sub(r"_sm\d+$", "", p.stem) for p in (ROOT / "ptx").glob("*.cu")}
    assert kernels - OPS == set()


@pytest.mark.parametrize("stem", sorted(OPS))
def test_every_op_has_its_kernel(stem: str) -> None:
    assert (ROOT / "ptx" / f"{stem}.cu").is_file()
