"""Timing decode steps, on a driver of host memory."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from helpers.rig import TINY
from ultraflash.tools import bench_decode


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
def test_steps_of_each_width(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, kernels: Path, tmp_path: Path
) -> None:
    file = tmp_path / "speed.csv"
    arguments = ["--checkpoint", str(TINY), "--rows", "1,4", "--steps", "7", "--warm", "2"]
    assert bench_decode.main([*arguments, "--length", "40", "--csv", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "NVIDIA H200; ckpt, block 5, us"
    assert [line.split()[0] for line in lines[2:4]] == ["1", "4"]
    assert lines[4] == f"2 rows appended to {file}"
    assert cuda.graph_launches == 2 * (7 + 2 + 5 * bench_decode._BACK_TO_BACK)
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    for row in rows:
        assert float(row["step_p99_us"]) >= float(row["step_p50_us"]) >= float(row["host_p50_us"])
        assert int(row["nodes"]) > 400
        assert (row["steps"], row["length"], row["block"]) == ("7", "40", "5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is no NVIDIA driver"),
        (("--length", "8190"), "--length 8190 and 8 rows do not fit into a context of 8192"),
        (("--checkpoint", "/nowhere"), "/nowhere"),
        (("--temperature", "1"), "8 rows of one conversation verify 7 drafts and a block has 5: "),
        (("--steps", "1"), "--steps must be at least 2, got 1"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str],
    cuda: FakeCuda,
    kernels: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    cuda.library = False
    assert bench_decode.main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench_decode: ")
    assert err.count("\n") == 1
    assert words in err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_decode.main(["--help"])
    text = capsys.readouterr().out
    for word in ("examples", "columns", "gap", "--csv"):
        assert word in text
