"""The official layout from names alone, against every published count (model.md 2.4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from helpers.checkpoints import bundled_model
from helpers.official_config import OFFICIAL_FLAT
from ultraflash.graphs.checkpoint import (
    DTYPE_BYTES,
    GROUPS,
    TensorSpec,
    expected_tensors,
    parameters,
    tensor_bytes,
)
from ultraflash.graphs.model import Model
from ultraflash.graphs.release import release_model


@pytest.fixture(scope="module")
def official() -> dict[str, TensorSpec]:
    return expected_tensors(release_model())


def test_flat_and_nested_configuration_say_the_same() -> None:
    assert Model.from_config(None, OFFICIAL_FLAT) == release_model()


def test_totals(official: dict[str, TensorSpec]) -> None:
    assert len(official) == 96_085
    assert sum(map(tensor_bytes, official.values())) == 510_286_023_000
    assert sum(map(parameters, official.values())) == 763_205_315_794
    assert sum(name.startswith("mtp.") for name in official) == 2401


@pytest.mark.parametrize(
    ("dtype", "elements", "tensors"),
    [
        ("BF16", 1_976_441_856, 520),
        ("F8_E4M3", 204_015_223_296, 357),
        ("F8_E8M0", 23_563_015_184, 47_589),
        ("F32", 42_307_282, 387),
        ("I8", 278_585_671_680, 47_232),
    ],
)
def test_dtypes(official: dict[str, TensorSpec], dtype: str, elements: int, tensors: int) -> None:
    of_dtype = [spec for spec in official.values() if spec.dtype == dtype]
    assert len(of_dtype) == tensors
    assert sum(tensor_bytes(spec) // DTYPE_BYTES[dtype] for spec in of_dtype) == elements


@pytest.mark.parametrize(
    ("group", "logical", "stored"),
    [
        ("routed experts", 543_581_798_400, 288_777_830_400),
        ("Engram tables", 196_613_849_600, 202_758_032_400),
        ("draft routed experts", 13_589_544_960, 7_219_445_760),
        ("attention", 5_064_696_320, 5_069_721_600),
        ("shared experts", 1_415_577_600, 1_416_960_000),
        ("token embedding", 661_913_600, 1_323_827_200),
        ("LM head", 661_913_600, 1_323_827_200),
        ("vision tower + aligner + delimiters", 485_268_480, 970_536_960),
        ("draft attention, main_proj, gates, norms, HC, confidence", 463_457_890, 474_774_152),
        ("Engram wkv + q/k weights", 314_654_720, 315_043_840),
        ("draft shared experts", 106_168_320, 106_272_000),
        ("routers", 78_673_920, 157_409_280),
        ("Markov head", 66_191_360, 132_382_720),
        ("indexers", 43_516_416, 45_130_752),
        ("hyper-connections", 39_323_760, 157_295_040),
        ("compressors", 18_352_128, 36_704_256),
        ("layer norms + final norm", 414_720, 829_440),
    ],
)
def test_groups(official: dict[str, TensorSpec], group: str, logical: int, stored: int) -> None:
    members = [spec for spec in official.values() if spec.group == group]
    assert sum(map(parameters, members)) == logical
    assert sum(map(tensor_bytes, members)) == stored


def test_every_group_is_named_and_used(official: dict[str, TensorSpec]) -> None:
    assert set(Counter(spec.group for spec in official.values())) == set(GROUPS)


def test_one_expert_has_the_published_size(official: dict[str, TensorSpec]) -> None:
    expert = [s for name, s in official.items() if name.startswith("layers.7.ffn.experts.383.")]
    assert sum(map(parameters, expert)) == 35_389_440
    assert sum(map(tensor_bytes, expert)) == 18_800_640


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.39.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.5.ffn.experts.0.w2.weight", "I8", (5120, 1152)),
        ("layers.5.ffn.experts.0.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
    ],
)
def test_shapes(
    official: dict[str, TensorSpec], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    assert (official[name].dtype, official[name].shape) == (dtype, shape)


def test_only_pairing_sources_have_a_gate(official: dict[str, TensorSpec]) -> None:
    gates = [name for name in official if name.endswith("compressor.wgate.weight")]
    assert gates == [f"layers.{layer}.attn.compressor.wgate.weight" for layer in (2, 8, 14)]


def test_a_model_without_vision_has_neither_tower_nor_image_bias() -> None:
    model = replace(bundled_model(), vision_layers=0)
    names = expected_tensors(model)
    assert not [n for n in names if n.startswith(("vision.", "aligner.", "image_")) or "_vl" in n]


def test_a_model_without_drafts_or_engram_has_no_such_tensors() -> None:
    model = replace(bundled_model(), draft_stages=0, engram_layers=(), engram_rows=())
    assert not [
        name for name in expected_tensors(model) if name.startswith("mtp.") or "engram" in name
    ]
