"""Timing chunks of prompts, on a driver of host memory."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from ultraflash.tools import bench_prefill

compiled = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


@compiled
@pytest.mark.parametrize(
    ("mode", "plans"),
    [
        ("full", [("part", "16"), ("end", "16"), ("part", "64"), ("end", "64")]),
        ("ced21", [("encode", "16"), ("encode", "64"), ("replay", "136")]),
    ],
)
def test_every_chunk_behind_every_context(
    capsys: pytest.CaptureFixture[str],
    cuda: FakeCuda,
    kernels: Path,
    tmp_path: Path,
    mode: str,
    plans: list[tuple[str, str]],
) -> None:
    file = tmp_path / "speed.csv"
    arguments = ["--weights", "synthetic", "--chunks", "64,16", "--context", "256,512"]
    arguments += ["--prefill", mode, "--ends", "--repeats", "2", "--csv", str(file)]
    assert bench_prefill.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "SYNTHETIC weights; one GPU; block 5; prefill " + mode in out
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    wanted = [(plan, rows_, context) for plan, rows_ in plans for context in ("256", "512")]
    assert [(r["plan"], r["chunk"], r["context"]) for r in rows] == wanted
    assert all(float(r["tokens_per_s"]) > 0 and float(r["ms"]) >= float(r["best_ms"]) for r in rows)


@compiled
def test_a_chunk_gives_its_memory_back(cuda: FakeCuda, kernels: Path) -> None:
    taken = []
    for chunks in ("16,64", "64"):
        used = cuda.used_bytes
        assert bench_prefill.main(["--chunks", chunks, "--context", "256", "--repeats", "1"]) == 0
        taken.append(cuda.used_bytes - used)
    assert taken[0] == taken[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chunks", "16"), "there is no NVIDIA driver"),
        (("--context", "1k"), "a chunk of 4096 rows does not fit into --context 1024"),
        (("--config", "full"), "add --weights synthetic"),
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
    assert bench_prefill.main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench_prefill: ")
    assert err.count("\n") == 1
    assert words in err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_prefill.main(["--help"])
    text = capsys.readouterr().out
    for word in ("examples", "plans:", "--chunks", "--csv", "emulated"):
        assert word in text
