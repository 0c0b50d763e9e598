"""Reading headers: what is damaged is named with file and sizes, what is wrong in one error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import bundled_model, copy_bundled, edit_json, poke, write_raw
from ultraflash.graphs.checkpoint import expected_tensors
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights import CheckpointIndex, weights_digest
from ultraflash.runtime.weights.index import INDEX_FILE, SINGLE_FILE

BYTES = np.arange(8, dtype=np.uint8)


def test_the_bundled_checkpoint_is_whole() -> None:
    index = CheckpointIndex.open(BUNDLED_CHECKPOINT)
    index.verify(bundled_model())
    assert len(index.tensors) == 1016
    assert index.total_bytes == 9_974_706


def test_raw_values_keep_shape_and_storage_type(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, np.ndarray]] = {
        "odd": ("F8_E8M0", np.array([1, 2, 3], np.uint8)),  # makes the next ones unaligned
        "half": ("BF16", np.array([[1, 2], [3, 0x8000]], np.uint16)),
        "single": ("F32", np.array([1.5, -2], np.float32)),
        "packed": ("I8", np.array([[-1, 127]], np.int8)),
    }
    write_raw(tmp_path / SINGLE_FILE, tensors)
    index = CheckpointIndex.open(tmp_path)
    for name, (_, values) in tensors.items():
        raw = index.raw(name)
        assert np.array_equal(raw, values.view(raw.dtype)), name
    assert index.raw("packed").dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        index.raw("single")[0] = 0


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds neither model.safetensors.index.json nor"):
        CheckpointIndex.open(tmp_path)
    folder = copy_bundled(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003.safetensors cannot be read"):
        CheckpointIndex.open(folder)


@pytest.mark.parametrize(("change", "state"), [(-1, "truncated"), (+5, "too long")])
def test_a_shard_of_the_wrong_length(tmp_path: Path, change: int, state: str) -> None:
    folder = copy_bundled(tmp_path)
    file = folder / "model-00003-of-00003.safetensors"
    size = file.stat().st_size
    os.truncate(file, size + change)
    expected = f"{file} is {state}: it has {size + change} bytes, its header describes {size}"
    with pytest.raises(WeightsError) as caught:
        CheckpointIndex.open(folder)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no safetensors file: it has 0 bytes"),
        (b"\x10\0\0\0\0\0\0\0{}", "has 10 bytes and announces a header of 16"),
        (b"\xff" * 32, "is no safetensors file"),
        (b"\x04\0\0\0\0\0\0\0{{{{", "has a damaged header"),
        (b"\x02\0\0\0\0\0\0\0[]", "header that is no JSON object"),
    ],
)
def test_a_damaged_header(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match=complaint):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 8]}, "in an unknown way"),
        ({"dtype": "U8", "shape": [8]}, "in an unknown way"),
        (
            {"dtype": "U8", "shape": [9], "data_offsets": [0, 8]},
            r"gives a 8 bytes, U8 \[9\] needs 9",
        ),
        ({"dtype": "U8", "shape": [-8], "data_offsets": [0, -8]}, "gives a -8 bytes"),
        ({"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}, "places a at byte"),
        ({"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "too long"),
    ],
)
def test_an_entry_that_contradicts_itself(
    tmp_path: Path, entry: dict[str, object], complaint: str
) -> None:
    write_raw(tmp_path / SINGLE_FILE, {"a": ("U8", BYTES)}, a=entry)
    with pytest.raises(WeightsError, match=complaint):
        CheckpointIndex.open(tmp_path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    write_raw(tmp_path / SINGLE_FILE, {"a": ("U8", BYTES)}, b=entry)
    with pytest.raises(WeightsError, match="its header is damaged"):
        CheckpointIndex.open(tmp_path)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path)
    path = folder / INDEX_FILE
    text = json.loads(path.read_text())
    text["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    text["weight_map"]["embed.weight"] = "model-00002-of-00003.safetensors"
    del text["weight_map"]["norm.weight"]
    path.write_text(json.dumps(text))
    with pytest.raises(WeightsError, match="disagrees with its shards about 3 tensors") as caught:
        CheckpointIndex.open(folder)
    for name in ("ghost", "embed.weight", "norm.weight"):
        assert name in str(caught.value)


def test_a_wrong_total_size(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path)
    edit_json(folder / INDEX_FILE, "metadata", "total_size", value=5)
    with pytest.raises(WeightsError, match="says total_size 5 but its shards hold 9974706"):
        CheckpointIndex.open(folder)


def test_an_index_may_not_reach_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(WeightsError, match="is not directly in"):
        CheckpointIndex.open(tmp_path)


def test_verify_names_everything_that_is_wrong_at_once(tmp_path: Path) -> None:
    expected = expected_tensors(bundled_model())
    kinds = {"BF16": np.uint16, "F32": np.float32}
    tensors = {
        name: (spec.dtype, np.zeros(spec.shape, kinds.get(spec.dtype, np.uint8)))
        for name, spec in expected.items()
    }
    del tensors["norm.weight"], tensors["layers.3.ffn.experts.7.w2.scale"]
    tensors["layers.3.extra"] = ("U8", BYTES)
    tensors["head.weight"] = ("BF16", np.zeros((512, 128), np.uint16))
    tensors["layers.0.attn.attn_sink"] = ("BF16", np.zeros(8, np.uint16))
    write_raw(tmp_path / SINGLE_FILE, tensors)
    with pytest.raises(WeightsError) as caught:
        CheckpointIndex.open(tmp_path).verify(bundled_model())
    first, *lines = str(caught.value).splitlines()
    assert "5 of 1016 tensors are wrong" in first
    assert [line.strip() for line in lines] == [
        "missing     norm.weight",
        "missing     layers.3.ffn.experts.7.w2.scale",
        "unexpected  layers.3.extra",
        "misshapen   head.weight: [512, 128] instead of [512, 256]",
        "wrong type  layers.0.attn.attn_sink: BF16 instead of F32",
    ]


def test_raw_of_an_unknown_name_or_type(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE_FILE, {"a": ("I64", np.zeros(1, np.int64))})
    index = CheckpointIndex.open(tmp_path)
    with pytest.raises(WeightsError, match="has no tensor b"):
        index.raw("b")
    with pytest.raises(WeightsError, match="a has dtype I64"):
        index.raw("a")


def test_the_digest_follows_content_and_not_place(tmp_path: Path) -> None:
    digest = weights_digest(CheckpointIndex.open(BUNDLED_CHECKPOINT))
    folder = copy_bundled(tmp_path)
    assert weights_digest(CheckpointIndex.open(folder)) == digest
    poke(folder, "layers.7.attn.wq_a.weight", 1000, 0x11)
    assert weights_digest(CheckpointIndex.open(folder)) != digest
