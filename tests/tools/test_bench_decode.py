"""Timing decode steps, on a driver of host memory."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from helpers.rig import TINY
from ultraflash.tools import bench_decode

compiled = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


@compiled
def test_steps_of_each_width_and_context(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, kernels: Path, tmp_path: Path
) -> None:
    file = tmp_path / "speed.csv"
    arguments = ["--checkpoint", str(TINY), "--rows", "1,4", "--steps", "7", "--warm", "2"]
    assert bench_decode.main([*arguments, "--context", "40,200", "--csv", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith("NVIDIA H200; ckpt, checkpoint; one GPU; block 5; routing random")
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["40", "1"], ["200", "1"], ["40", "4"], ["200", "4"],
    ]  # fmt: skip
    assert lines[6].startswith("memory: ")
    assert lines[7] == f"rows appended to {file}"
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 4
    for row in rows:
        assert float(row["step_p99_ms"]) >= float(row["step_p50_ms"]) > 0
        assert float(row["gpu_p99_ms"]) >= float(row["gpu_p50_ms"]) > 0
        assert int(row["nodes"]) > 400
        assert (row["steps"], row["block"], row["world"], row["routing"]) == (
            "7", "5", "1", "random",
        )  # fmt: skip
        assert row["capacity"] == "200"
    assert float(rows[1]["read_gb"]) > float(rows[0]["read_gb"])  # more entries are scored


@compiled
def test_a_table_that_is_broken_off_has_what_was_measured(
    cuda: FakeCuda, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []

    def stop_at_the_second(*figures: object) -> None:
        shown.append(figures)
        if len(shown) == 3:  # the heading, a row, and another
            raise OSError("no more")

    monkeypatch.setattr(bench_decode, "_print", stop_at_the_second)
    file = tmp_path / "speed.csv"
    arguments = ["--checkpoint", str(TINY), "--rows", "1", "--steps", "7", "--warm", "2"]
    assert bench_decode.main([*arguments, "--context", "40,80,200", "--csv", str(file)]) == 1
    with file.open(newline="") as opened:
        assert [row["context"] for row in csv.DictReader(opened)] == ["40", "80"]


@compiled
def test_synthetic_weights_are_said(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, kernels: Path
) -> None:
    arguments = ["--weights", "synthetic", "--rows", "3", "--steps", "2", "--warm", "0", "--ops"]
    assert bench_decode.main([*arguments, "--routing", "equal"]) == 0
    out = capsys.readouterr().out
    assert "SYNTHETIC weights; one GPU; block 5; routing equal" in out
    assert "by operation, 3 rows at 1,024" in out
    assert "linear wq_a" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is no NVIDIA driver"),
        (("--context", "9"), "--context 9 is too short for steps of these rows"),
        (("--checkpoint", "/nowhere"), "/nowhere"),
        (("--steps", "1"), "--steps must be at least 2, got 1"),
        (("--config", "full"), "--config full has no files: add --weights synthetic"),
        (("--world", "2"), "world 2 on one GPU exchanges nothing real: add --weights synthetic"),
        (("--weights", "synthetic", "--rank", "1"), "--rank 1 is none of world 1"),
        (("--routing", "equal"), "--routing equal is steered by --weights synthetic"),
        (
            ("--config", "full", "--weights", "synthetic", "--world", "5"),
            "world 5 does not divide attention heads (64)",
        ),
        (
            ("--config", "full", "--weights", "synthetic", "--world", "8", "--context", "2M"),
            "--context 2097152 is more than the model's 1048576",
        ),
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


def test_weights_that_do_not_fit_say_what_is_needed(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, kernels: Path
) -> None:
    assert bench_decode.main(["--config", "full", "--weights", "synthetic"]) == 1
    err = capsys.readouterr().err
    assert "one rank of world 1 need 474.3 GiB, 8.0 of 8.0 GiB of NVIDIA H200 are free" in err
    assert "choose a larger world" in err


@pytest.mark.parametrize("text", ["", "k", "8x", "1kk", "0", "1,,2"])
def test_contexts_are_numbers(text: str) -> None:
    with pytest.raises(SystemExit):
        bench_decode.main(["--context", text])


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_decode.main(["--help"])
    text = capsys.readouterr().out
    for word in ("examples", "columns", "gap", "--csv", "--hop-us", "emulated"):
        assert word in text
