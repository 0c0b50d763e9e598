"""Loading: exact values for every rank, tables left on disk, damage named."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import GOLDEN, bundled_model, copy_bundled, poke
from ultraflash.graphs.errors import WorldError
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import E2M1, E4M3
from ultraflash.graphs.ops.engram_gather import EngramGather
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights import (
    CheckpointIndex,
    MappedRows,
    Weights,
    load_weights,
    weight_table,
)

CKPT = GOLDEN / "ckpt"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_checkpoint(CKPT)


@pytest.fixture(scope="module")
def index() -> CheckpointIndex:
    return CheckpointIndex.open(CKPT)


@pytest.fixture(scope="module")
def whole(index: CheckpointIndex, model: Model) -> Weights:
    return load_weights(index, model, 1)


def test_everything_of_the_table_is_there_in_its_form(whole: Weights, model: Model) -> None:
    table = weight_table(model)
    assert set(whole.names) == set(table)
    for name, row in table.items():
        value = whole.host(name)
        assert value.shape == row.shape, name
        if row.format != "rows8":
            assert value.dtype == row.dtype, name
            assert value.flags.c_contiguous
            assert not value.flags.writeable or not row.sources


def test_a_dense_matrix_element_by_element(whole: Weights, index: CheckpointIndex) -> None:
    codes = index.raw("layers.3.attn.wq_b.weight")
    scales = index.raw("layers.3.attn.wq_b.scale")
    value = whole.host("layers.3.attn.wq_b")
    for n, k in ((0, 0), (31, 31), (32, 33), (511, 63)):
        expected = float(E4M3[codes[n, k]]) * 2.0 ** (int(scales[n // 32, k // 32]) - 127)
        assert value[n, k] == expected


def test_an_expert_element_by_element(whole: Weights, index: CheckpointIndex) -> None:
    codes = index.raw("layers.3.ffn.experts.6.w2.weight")
    scales = index.raw("layers.3.ffn.experts.6.w2.scale")
    value = whole.host("layers.3.ffn.experts.w2")[6]
    for n, k in ((0, 0), (0, 1), (17, 32), (255, 63)):
        nibble = (int(codes[n, k // 2]) >> (4 * (k % 2))) & 15
        assert value[n, k] == float(E2M1[nibble]) * 2.0 ** (int(scales[n, k // 32]) - 127)


def test_ranks_joined_are_the_whole(index: CheckpointIndex, model: Model, whole: Weights) -> None:
    halves = load_weights(index, model, 2)
    for name, row in weight_table(model).items():
        if row.axis is None:
            assert halves.host(name, 0) is halves.host(name, 1), name
            continue
        parts = [halves.host(name, rank) for rank in range(2)]
        assert all(part.flags.c_contiguous for part in parts)
        assert np.array_equal(np.concatenate(parts, row.axis), whole.host(name)), name


def test_engram_tables_stay_mapped(whole: Weights, index: CheckpointIndex) -> None:
    table = whole.host("layers.1.engram.embed")
    assert isinstance(table, MappedRows)
    assert np.shares_memory(table.codes, index.raw("layers.1.engram.embed.weight"))
    assert np.shares_memory(table.scales, index.raw("layers.1.engram.embed.scale"))
    rows = np.array([[0, 6125], [77, 0]])
    values = EngramGather.reference(rows, table)
    scale = np.ldexp(1.0, table.scales[77].astype(np.int32) - 127)
    assert np.array_equal(values[1, :32], E4M3[table.codes[77]] * scale.repeat(32))


def test_only_what_was_asked_for_is_loaded(index: CheckpointIndex, model: Model) -> None:
    seen: list[tuple[int, int]] = []
    names = ("norm", "layers.0.ffn.experts.w1")
    weights = load_weights(index, model, 1, names, lambda done, total: seen.append((done, total)))
    assert weights.names == names
    total = 256 * 2 + 8 * 64 * (128 + 8)
    assert seen == [(512, total), (total, total)]
    with pytest.raises(WeightsError, match="weight head was not loaded"):
        weights.host("head")
    with pytest.raises(WeightsError, match="no rank 1 in a world of 1"):
        weights.host("norm", 1)


def test_an_unknown_name_is_refused(index: CheckpointIndex, model: Model) -> None:
    with pytest.raises(WeightsError, match=r"no weight layers.0.attn.wqq, nrm"):
        load_weights(index, model, 1, ["norm", "layers.0.attn.wqq", "nrm"])


def test_a_world_that_does_not_divide(index: CheckpointIndex, model: Model) -> None:
    with pytest.raises(WorldError, match="world 3 does not divide attention heads"):
        load_weights(index, model, 3)


@pytest.mark.parametrize(
    ("tensor", "position", "where"),
    [
        ("layers.2.attn.wkv.scale", 9, r"\[1, 1\]"),
        ("layers.9.ffn.experts.5.w3.scale", 8 * 63, r"\[63, 0\]"),
        ("layers.4.engram.embed.scale", 6331, r"\[6331, 0\]"),
    ],
)
def test_a_nan_scale_byte(tmp_path: Path, tensor: str, position: int, where: str) -> None:
    folder = copy_bundled(tmp_path)
    poke(folder, tensor, position, 255)
    with pytest.raises(WeightsError, match=rf"{tensor} holds the NaN scale byte 255 at {where}"):
        load_weights(CheckpointIndex.open(folder), bundled_model(), 2)


def test_a_nan_code(tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path)
    poke(folder, "layers.2.attn.wkv.weight", 256 * 3 + 5, 0x7F)
    with pytest.raises(WeightsError, match=r"layers.2.attn.wkv.weight holds nan at \[3, 5\]"):
        load_weights(CheckpointIndex.open(folder), bundled_model(), 1)


def test_a_model_larger_than_memory(
    index: CheckpointIndex, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    with pytest.raises(WeightsError, match=r"takes 0.1 GB of memory .* has 0.0: use a smaller"):
        load_weights(index, model, 1)


def test_the_log_says_what_was_loaded_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load_weights(CheckpointIndex.open(BUNDLED_CHECKPOINT), bundled_model(), 1, ["embed"])
    text = caplog.text
    assert "vision: 26 tensors (644864 bytes) recognised and skipped" in text
    assert "262144 bytes of 1 weights for world 1" in text
    assert "GB/s" in text
