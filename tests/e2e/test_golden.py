"""The real engine against the model authors' own numbers (tests/golden/tiny-a)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.tools import check_golden

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
ADAPTER = Path(__file__).parents[1] / "helpers" / "golden_adapter.py"


# World 2 leaves out the bf16 rounding of each expert's output and adds halves in fp32; that stays
# within the limits of one rank, so there are no others.
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_engine_agrees_with_the_reference(world: int, capsys: pytest.CaptureFixture[str]) -> None:
    status = check_golden.main([str(TINY), "--world", str(world)])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, "\n".join(line for line in lines if "  FAIL" in line)
    skipped = {line.split()[0] for line in lines if "  SKIP" in line}
    assert skipped == {"resize_plans", "vision"}
    assert sum("  PASS" in line for line in lines) > 1000


@pytest.mark.slow
def test_fp32_attention_weights_stay_within_the_wide_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = check_golden.main([str(TINY), "--attention", "fp32"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, "\n".join(line for line in lines if "  FAIL" in line)


@pytest.mark.parametrize(
    "tensor",
    [
        "layers.3.attn.attn_sink",
        "layers.2.attn.compressor.wgate.weight",
        "layers.4.engram.k_weight",
        "layers.8.ffn.experts.5.w2.scale",
        "layers.9.hc_ffn_base",
        "norm.weight",
    ],
)
def test_one_wrong_tensor_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensor: str
) -> None:
    """One bit of every fourth byte of one tensor is flipped."""
    shutil.copytree(TINY / "ckpt", tmp_path / "ckpt")
    (tmp_path / "expected").symlink_to(TINY / "expected")
    info = CheckpointIndex.open(tmp_path / "ckpt").tensors[tensor]
    with info.file.open("r+b") as shard:
        shard.seek(info.offset)
        values = bytearray(shard.read(info.nbytes))
        for place in range(3, info.nbytes, 4):
            values[place] ^= 0x02
        shard.seek(info.offset)
        shard.write(values)
    assert check_golden.main([str(tmp_path), "--only", "layers_f32idx_P33 prefill."]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_unknown_folder_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ultraflash.tools.check_golden", "/nowhere"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "check_golden: /nowhere is not a folder: "
        "give a golden folder, which holds ckpt/ and expected/\n"
    )
