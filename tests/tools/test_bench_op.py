"""Timing one operation, on a driver of host memory: what is placed, launched, printed, kept."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda, Gpu
from ultraflash.tools import bench_op

needs_compiler = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


@pytest.fixture(autouse=True)
def _small_gpu(cuda: FakeCuda, kernels: Path) -> None:
    cuda.gpus = (Gpu(total_bytes=1 << 26),)  # the probe reads a quarter of it


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = bench_op.main(arguments)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert bench_op.main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench_op: ")
    assert err.count("\n") == 1
    return err


@needs_compiler
def test_every_shape_of_an_operation_is_timed(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda
) -> None:
    lines = shown(capsys, "rms_norm", "--rows", "1,3").splitlines()
    assert lines[0] == "NVIDIA H200, driver CUDA 13.0; tiny, world 1, context 8,192"
    assert lines[1].split()[:4] == ["rows", "node", "shapes", "nodes"]
    rows = [line.split() for line in lines[2:-1]]
    assert {row[0] for row in rows} == {"1", "3"}
    assert [row[1:3] for row in rows if row[0] == "3"][:2] == [
        ["L0.attn.qr_q8", "weight[64]:bf16"],
        ["L2.attn.latent", "weight[64]:bf16"],
    ]
    assert re.fullmatch(
        r"of a step: [\d.]+ ms at 1 rows, [\d.]+ ms at 3 rows; "
        r"reading memory: [\d,]+ GB/s; an empty launch: [\d.]+ us",
        lines[-1],
    )
    names = {launch[0] for launch in cuda.launches}
    assert names == {"uf_rms_norm", "uf_stream_read"}
    assert cuda.allocated == {}, "every buffer is given back"


@needs_compiler
def test_every_operation_of_the_tiny_model_can_be_timed(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, tmp_path: Path
) -> None:
    """Copies that leave an allocation would fail here."""
    file = tmp_path / "speed.csv"
    text = shown(capsys, "all", "--rows", "2", "--context", "512", "--csv", str(file))
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert text.splitlines()[-1] == f"{len(rows)} rows appended to {file}"
    assert {row["op"] for row in rows} > {"linear", "accept", "draft_sample", "engram_gather"}
    for row in rows:
        assert (row["gpu"], row["model"], row["rows"]) == ("NVIDIA H200", "tiny", "2")
        assert float(row["us"]) >= float(row["best_us"]) > 0
        assert int(row["nbytes"]) > 0
        assert int(row["registers"]) > 0
    copies = {row["shapes"]: int(row["copies"]) for row in rows if row["op"] == "linear"}
    assert copies["w[64,256]:fp8"] * (64 * 256 + 2 * 8) > 3 * cuda.gpus[0].l2_bytes
    assert copies["w[512,256]:bf16"] == 1, "alone too large for the L2 cache"
    assert cuda.allocated == {}


@needs_compiler
def test_the_default_table_is_the_gpus(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ultraflash.tools.speed_table.FOLDER", tmp_path)
    text = shown(capsys, "swiglu", "--rows", "1", "--block", "0", "--csv")
    assert text.splitlines()[-1] == f"1 rows appended to {tmp_path / 'h200.csv'}"


@needs_compiler
def test_what_does_not_fit_is_told_and_given_back(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda
) -> None:
    text = refused(capsys, "linear", "--release", "--rows", "1")
    assert re.search(r"buffer .* needs [\d.]+ GiB of GPU memory", text)
    assert cuda.allocated == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("linear",), "there is no NVIDIA driver"),
        (("lineal",), "has no operation 'lineal': it has accept, attention"),
        (("linear", "--world", "3"), "world 3 does not divide"),
        (("linear", "--checkpoint", "/nowhere"), "/nowhere"),
        (("linear", "--context", "9000000"), "--context 9000000 is more than the model's"),
    ],
)
def test_refusals_come_before_any_work(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, arguments: tuple[str, ...], words: str
) -> None:
    cuda.library = False
    assert words in refused(capsys, *arguments)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_op.main(["--help"])
    text = capsys.readouterr().out
    for word in ("examples", "--release --world 8", "% of read", "graphs/ops/"):
        assert word in text
