"""Inspecting, verifying and pre-sharding from the command line."""

from __future__ import annotations

import io
import json
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from helpers.checkpoints import bundled_model, copy_bundled, edit_json, poke
from ultraflash.graphs.checkpoint import expected_tensors
from ultraflash.graphs.release import release_model
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights import (
    CheckpointIndex,
    load_weights,
    weight_table,
    weights_digest,
)
from ultraflash.tools import load_weights as tool
from ultraflash.tools.make_tiny import TP, make_tiny


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = tool.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_tables_and_verification(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, BUNDLED_CHECKPOINT, "--check")
    assert (status, err) == (0, "")
    cells = [[c.strip() for c in line.split("\u2502")] for line in out.splitlines()]
    rows = {c[1]: c[2:6] for c in cells if len(c) == 7}
    assert rows["routed experts"] == ["480", "3,932,160", "2,088,960", "F8_E8M0 I8"]
    assert rows["hyper-connections"] == ["60", "492,060", "1,968,240", "F32"]
    assert rows["total"][:3] == ["1,016", "9,408,094", "9,974,706"]
    assert "all 1,016 tensors and the tokenizer are as config.json asks" in out
    assert "checking: 9,974,706 bytes" in out
    assert "every scale and every value is a number" in out


def test_the_release_from_names_alone() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(tool.group_table(expected_tensors(release_model()), "release"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "763,205,315,794" in text
    assert "510,286,023,000" in text
    own, shared = tool.plan_shards(release_model(), 8)
    assert len(own) + len(shared) == 96_085


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_shards_joined_are_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], world: int
) -> None:
    source = tmp_path / "whole"
    model = make_tiny(source, TP)
    out = tmp_path / "shards"
    status, text, _ = run(capsys, source, "--world", world, "--shard", out)
    assert status == 0
    assert f"wrote {world} ranks into {out}" in text

    whole = CheckpointIndex.open(source)
    ranks = [CheckpointIndex.open(tool.rank_folder(out, r, world)) for r in range(world)]
    table = {s: row for row in weight_table(model).values() for s in row.sources}
    for name in whole.tensors:
        parts = [rank.raw(name) for rank in ranks]
        row = table.get(name)
        if row is None or row.axis is None:
            assert all(np.array_equal(part, whole.raw(name)) for part in parts), name
        else:
            stored_axis = row.axis - 1 if row.format == "fp4" else row.axis
            assert np.array_equal(np.concatenate(parts, stored_axis), whole.raw(name)), name
    for number, rank in enumerate(ranks):
        assert rank.shard is not None
        assert (rank.shard.rank, rank.shard.world) == (number, world)
        assert rank.shard.source == weights_digest(whole)
        rank.verify(model)


def test_a_rank_folder_is_complete_and_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, BUNDLED_CHECKPOINT, "--world", 2, "--shard", tmp_path)
    folder = tool.rank_folder(tmp_path, 1, 2)
    status, out, _ = run(capsys, folder, "--check")
    assert status == 0
    assert "1,016" in out
    for name in ("config.json", "inference/config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (BUNDLED_CHECKPOINT / name).read_bytes()
    assert json.loads((folder / "shard.json").read_text())["common"] == "../common"
    with pytest.raises(WeightsError, match="is rank 1 of a checkpoint pre-sharded for 2 ranks"):
        load_weights(CheckpointIndex.open(folder), bundled_model(), 2)
    status, _, err = run(capsys, folder, "--world", 2, "--shard", tmp_path / "again")
    assert status == 1
    assert "is a shard itself: split the folder it was made from" in err


def test_shards_of_limited_size(tmp_path: Path) -> None:
    index = CheckpointIndex.open(BUNDLED_CHECKPOINT)
    console = Console(file=io.StringIO())
    tool.shard(bundled_model(), index, 2, tmp_path, console, shard_bytes=2_000_000)
    files = sorted((tmp_path / "rank-0-of-2").glob("*.safetensors"))
    assert len(files) == 4
    assert all(f.stat().st_size < 2_100_000 for f in files)
    CheckpointIndex.open(tmp_path / "rank-0-of-2").verify(bundled_model())


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with tool.meter(console, "writing", 100) as advance:
        advance(100)
    assert "writing" in stream.getvalue()


def test_elsewhere_lines_tell_rate_and_time_left() -> None:
    stream = io.StringIO()
    clock = iter([0.0, 6.0, 7.0, 12.0, 13.0])
    console = Console(file=stream, width=100)
    with tool.meter(console, "writing", 4 * 10**9, lambda: next(clock)) as advance:
        for _ in range(3):
            advance(10**9)
    assert stream.getvalue().splitlines() == [
        "writing: 1.0 of 4.0 GB, 0.17 GB/s, 18 s left",
        "writing: 3.0 of 4.0 GB, 0.25 GB/s, 4 s left",
        "writing: 3,000,000,000 bytes in 13.0 s, 0.23 GB/s",
    ]


# --- bad input: one sentence, exit status 1 ---


def test_check_names_every_damaged_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_bundled(tmp_path)
    poke(folder, "layers.4.engram.embed.scale", 17, 255)
    poke(folder, "layers.0.attn.wkv.weight", 256 + 3, 0xFF)
    poke(folder, "norm.weight", 5, 0x7F)
    poke(folder, "norm.weight", 4, 0xFF)
    assert run(capsys, folder)[0] == 0  # names and shapes are fine
    status, _, err = run(capsys, folder, "--check")
    assert status == 1
    assert "3 tensors hold values that are no numbers; fetch their files again" in err
    for line in (
        "layers.4.engram.embed.scale in model-0000",
        "NaN scale byte 255 at [17, 0], 1 in all",
        "no F8_E4M3 at [1, 3], 1 in all",
        "no BF16 at [2], 1 in all",
    ):
        assert line in err


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("num_hidden_layers", 9, "draft target layers [7, 8, 9] are not ascending numbers below 9"),
        ("n_routed_experts", 7, "does not fit its config.json"),
        ("hidden_size", 288, "misshapen   embed.weight: [512, 256] instead of [512, 288]"),
        ("dspark_noise_token_id", 3, "dspark_noise_token_id is 3 but <\uff5cSystem\uff5c> has id"),
        (
            "engram_compressed_vocab_size",
            99,
            "compressed ids but engram_compressed_vocab_size is 99",
        ),
        ("vocab_size", None, "config.json lacks"),
    ],
)
def test_a_configuration_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, complaint: str
) -> None:
    folder = copy_bundled(tmp_path)
    (folder / "inference" / "config.json").unlink()
    edit_json(folder / "config.json", "text_config", key, value=value)
    status, _, err = run(capsys, folder)
    assert status == 1
    assert complaint in err
    assert "Traceback" not in err


def test_a_type_that_no_weight_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_bundled(tmp_path)
    for file in folder.glob("*.safetensors"):  # as long in the header, and of the same size
        data = file.read_bytes()
        file.write_bytes(data.replace(b'"dtype":"BF16"', b'"dtype":"F16" ', 1))
    status, out, err = run(capsys, folder)
    assert status == 1
    assert "F16 instead of BF16" in err
    assert "total" in out, "what can be counted is shown"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--world", 3), "world 3 does not divide attention heads (8)"),
        (("--world", 0), "world must be at least 1, got 0"),
        (("--world", 2, "--shard", BUNDLED_CHECKPOINT), "is not empty: choose another folder"),
        (("--world", 2, "--shard", BUNDLED_CHECKPOINT / "config.json"), "cannot be written"),
    ],
)
def test_a_split_that_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], complaint: str
) -> None:
    status, _, err = run(capsys, BUNDLED_CHECKPOINT, *arguments)
    assert status == 1
    assert complaint in err


def test_a_folder_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, tmp_path)
    assert status == 1
    assert err.strip() == (
        f"{tmp_path} holds no config.json: give the folder of an official-layout checkpoint"
    )


def test_a_disk_that_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 5, 5))
    status, _, err = run(capsys, BUNDLED_CHECKPOINT, "--world", 2, "--shard", tmp_path / "s")
    assert status == 1
    assert "bytes but its disk has 5 free: choose another disk" in err


def test_shard_needs_a_world(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main([str(BUNDLED_CHECKPOINT), "--shard", str(tmp_path)])
    assert caught.value.code == 2
    assert "--shard needs --world N" in capsys.readouterr().err
