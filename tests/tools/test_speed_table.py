"""Speed tables: which file, which rows."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from ultraflash.tools import speed_table
from ultraflash.tools.speed_table import FOLDER, append, commit, driver, gpu_csv, today


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    us: float


@pytest.mark.parametrize(
    ("gpu", "what", "name"),
    [
        ("NVIDIA H200", "", "h200.csv"),
        ("NVIDIA H200", "decode", "h200_decode.csv"),
        ("NVIDIA B200 SXM", "", "b200.csv"),
        ("", "", "gpu.csv"),
    ],
)
def test_a_gpu_has_its_own_file(gpu: str, what: str, name: str) -> None:
    assert gpu_csv(gpu, what) == FOLDER / name


def test_rows_stand_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200.csv"
    for row in (Row("a, with a comma", 1.5), Row("b", 2.0)):
        append(path, row)
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["what", "us"], ["a, with a comma", "1.5"], ["b", "2.0"]]


def test_a_row_says_what_was_measured_and_when() -> None:
    assert commit()
    assert len(today().split("-")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep 30 2025\nGCC 12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
    ],
)
def test_the_driver_is_named_as_operators_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    module = tmp_path / "version"
    monkeypatch.setattr(speed_table, "_MODULE", module)
    assert driver(13000) == "CUDA 13.0"
    module.write_text(text)
    assert driver(13000) == "580.159.04"
