"""The loading benchmark on a driver made of host memory: what is written, placed and printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from helpers.rig import TINY
from ultraflash.graphs.checkpoint import expected_tensors, tensor_bytes
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.weights.check import find_damage
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.write import write_checkpoint
from ultraflash.tools import bench_load
from ultraflash.tools.bench_load import Filling, main, wide_model


@pytest.mark.parametrize("gb", [5, 12, 60.5])
def test_the_size_is_what_was_asked_for(gb: float) -> None:
    size = sum(map(tensor_bytes, expected_tensors(wide_model(gb)).values()))
    assert gb - 0.5 < size / 1e9 <= gb


def test_too_small_a_size_names_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"--gb must be at least \d\.\d, got 1"):
        wide_model(1)


def test_codes_are_numbers(tmp_path: Path) -> None:
    """What is written passes the check that real checkpoints have to pass."""
    every = expected_tensors(wide_model(5))
    wanted = ("layers.0.attn.wkv", "layers.0.ffn.experts.1.w1")
    specs = {f"{n}.{end}": every[f"{n}.{end}"] for n in wanted for end in ("weight", "scale")}
    write_checkpoint(tmp_path, specs, Filling(specs), 1 << 30)
    index = CheckpointIndex.open(tmp_path)
    assert find_damage(index, lambda count: None) == []
    a, b = (index.raw(name) for name in ("layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale"))
    assert a.std() > 10
    assert len(np.unique(b)) > 3


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
@pytest.mark.parametrize("least", ["0", "1000"])
def test_a_measurement(
    cuda: FakeCuda,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kernel_cache: Path,
    least: str,
) -> None:
    monkeypatch.setenv("UF_CACHE_DIR", str(kernel_cache))
    monkeypatch.setattr(bench_load, "_CHUNK_BYTES", 1 << 20)
    before = cuda.used_bytes
    status = main(["--checkpoint", str(TINY), "--times", "2", "--least", least])
    out, err = capsys.readouterr()
    assert status == (least != "0")
    assert cuda.used_bytes == before, "weights and buffers are given back"
    assert not cuda.pinned
    speeds = re.findall(r"([\w, ]+): [\d.]+ s, [\d.]+ GB/s", out)
    threads = f"reading, {os.cpu_count()} threads"
    assert speeds == ["reading, one thread", threads, "copying", "loading"]
    share = re.search(r"plain reading and copying / loading = ([\d.]+); [\d.]+ where \d+ ", out)
    assert share
    assert float(share[1]) > 0
    assert ("is less than 1000" in err) == (least != "0")


def test_without_a_gpu_it_says_so(
    cuda: FakeCuda, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before it writes gigabytes."""
    cuda.library = False
    assert main(["--folder", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "there is no NVIDIA driver" in err
    assert not out
    assert not list(tmp_path.iterdir())
