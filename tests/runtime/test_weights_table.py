"""Which tensors make which weight, and that the parts of all ranks are the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.checkpoints import bundled_model
from ultraflash.graphs.checkpoint import VISION, expected_tensors
from ultraflash.graphs.release import release_model
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights import Row, weight_table
from ultraflash.runtime.weights.table import cut_specs, shard_range, stored_slices
from ultraflash.tools.make_tiny import TP

TABLE = weight_table(bundled_model())


def test_every_tensor_belongs_to_exactly_one_weight() -> None:
    used = [source for row in TABLE.values() for source in row.sources]
    wanted = [name for name, s in expected_tensors(bundled_model()).items() if s.group != VISION]
    assert sorted(used) == sorted(wanted)


@pytest.mark.parametrize(
    ("name", "format", "axis", "dtype", "shape"),
    [
        ("embed", "bf16", None, "float32", (512, 256)),
        ("head", "bf16", 0, "float64", (512, 256)),
        ("norm", "bf16", None, "float32", (256,)),
        ("layers.0.attn.wq_a", "fp8", None, "float64", (64, 256)),
        ("layers.0.attn.wq_b", "fp8", 0, "float64", (512, 64)),
        ("layers.0.attn.attn_sink", "f32", 0, "float32", (8,)),
        ("layers.0.attn.wo_a", "fp8", 0, "float64", (128, 256)),
        ("layers.0.attn.wo_b", "fp8", 1, "float64", (256, 128)),
        ("layers.0.hc_attn_fn", "f32", None, "float64", (24, 1024)),
        ("layers.0.hc_attn_base", "f32", None, "float32", (24,)),
        ("layers.0.ffn.gate", "bf16", None, "float64", (8, 256)),
        ("layers.0.ffn.gate.bias_vl", "f32", None, "float32", (8,)),
        ("layers.0.ffn.experts.w1", "fp4", 1, "float64", (8, 64, 256)),
        ("layers.0.ffn.experts.w2", "fp4", 2, "float64", (8, 256, 64)),
        ("layers.0.ffn.shared_experts.w3", "fp8", 0, "float64", (64, 256)),
        ("layers.0.ffn.shared_experts.w2", "fp8", 1, "float64", (256, 64)),
        ("layers.1.engram.embed", "rows8", None, "uint8", (6126, 32)),
        ("layers.1.engram.wkv", "fp8", None, "float64", (1280, 192)),
        ("layers.1.engram.k_weight", "bf16", None, "float32", (4, 256)),
        ("layers.2.attn.compressor.wgate", "bf16", None, "float64", (64, 256)),
        ("layers.2.attn.indexer.wq_b", "fp8", 0, "float64", (256, 64)),
        ("layers.2.attn.indexer.weights_proj", "bf16", 0, "float64", (8, 256)),
        ("mtp.0.main_proj", "fp8", None, "float64", (256, 768)),
        ("mtp.1.ffn.experts.w3", "fp4", 1, "float64", (4, 64, 256)),
        ("mtp.2.markov_head.embed", "bf16", None, "float32", (512, 32)),
        ("mtp.2.markov_head.head", "bf16", 0, "float64", (512, 32)),
        ("mtp.2.confidence_head.proj", "bf16", None, "float64", (1, 288)),
        ("engram.token_map", "int64", None, "int64", (512,)),
        ("layers.4.engram.primes", "int64", None, "int64", (6,)),
        ("layers.4.engram.multipliers", "int64", None, "int64", (4,)),
    ],
)
def test_rows(name: str, format: str, axis: int | None, dtype: str, shape: tuple[int, ...]) -> None:
    row = TABLE[name]
    assert (row.format, row.axis, row.dtype, row.shape) == (format, axis, dtype, shape)


def test_sources_come_with_their_scales_in_order_of_experts() -> None:
    sources = TABLE["layers.5.ffn.experts.w2"].sources
    assert sources[:3] == (
        "layers.5.ffn.experts.0.w2.weight",
        "layers.5.ffn.experts.0.w2.scale",
        "layers.5.ffn.experts.1.w2.weight",
    )
    assert len(sources) == 16


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_parts_of_all_ranks_joined_are_the_whole(world: int) -> None:
    specs = expected_tensors(TP)
    parts = cut_specs(TP, world)
    for row in weight_table(TP).values():
        for source in row.sources:
            shape = specs[source].shape
            whole = np.arange(np.prod(shape)).reshape(shape)
            cuts = [whole[stored_slices(row, source, world, rank)] for rank in range(world)]
            assert all(cut.shape == parts[source].shape for cut in cuts), source
            if row.axis is None:
                assert all(np.array_equal(cut, whole) for cut in cuts)
                continue
            axis = next((i for i, n in enumerate(cuts[0].shape) if n != shape[i]), 0)
            assert np.array_equal(np.concatenate(cuts, axis), whole), source


def test_the_release_splits_over_eight_ranks() -> None:
    parts = cut_specs(release_model(), 8)
    assert parts["layers.0.attn.wq_b.weight"].shape == (4096, 1280)
    assert parts["layers.0.attn.wq_b.scale"].shape == (128, 40)
    assert parts["layers.0.attn.wo_b.weight"].shape == (5120, 1024)
    assert parts["layers.0.attn.wo_b.scale"].shape == (160, 32)
    assert parts["layers.0.ffn.experts.383.w1.weight"].shape == (288, 2560)
    assert parts["layers.0.ffn.experts.383.w2.weight"].shape == (5120, 144)
    assert parts["layers.0.ffn.experts.383.w2.scale"].shape == (5120, 9)
    assert parts["layers.1.engram.embed.weight"].shape == (384006168, 256)
    assert parts["head.weight"].shape == (16160, 5120)


@pytest.mark.parametrize(
    ("row", "world"),
    [
        (Row("a.wo_b", ("w", "s"), "fp8", 1, "float64", (64, 96)), 2),
        (Row("a.wq_b", ("w", "s"), "fp8", 0, "float64", (96, 64)), 2),
        (Row("a.experts.w2", ("w", "s"), "fp4", 2, "float64", (4, 64, 96)), 2),
        (Row("a.head", ("w",), "bf16", 0, "float64", (10, 64)), 3),
    ],
)
def test_a_cut_off_the_border_is_refused_by_name(row: Row, world: int) -> None:
    with pytest.raises(WeightsError, match=rf"{row.name} cannot be split over {world} ranks: \d+ "):
        shard_range(row, world, 0)


def test_experts_may_be_cut_between_any_rows() -> None:
    # Their scales run along the other axis, so that no border is crossed.
    row = Row("a.experts.w1", ("w", "s"), "fp4", 1, "float64", (4, 6, 64))
    assert stored_slices(row, "x.scale", 3, 2) == (slice(4, 6), slice(None))


def test_cut_specs_names_the_weight_that_does_not_divide() -> None:
    model = replace(bundled_model(), o_groups=8, o_rank=8)
    with pytest.raises(WeightsError, match=r"layers.0.attn.wo_a cannot be split over 4 ranks"):
        cut_specs(model, 4)
