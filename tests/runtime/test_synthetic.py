"""Random weights and state: the released statistics, by name alone."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from helpers.golden_plans import tiny_model
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.numerics import E4M3, E8M0, F32
from ultraflash.graphs.plan import Life, Plan, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.formats import dequantise
from ultraflash.runtime.weights.synthetic import (
    EMBEDDING_RMS,
    KINDRED,
    KINSHIP,
    Codes,
    Normal,
    constants,
    kindred_rows,
    state_content,
    weight_contents,
)

SAMPLE = 64  # rows of a matrix that are looked at


@functools.cache
def plan(world: int = 8) -> Plan:
    model = release_model()
    return build_decode(Build(model, Capacity(2, 4096), world, model.draft_block), 6, 1)


def weights() -> list[Ref]:
    """One of each role of the released model."""
    known = constants(release_model())
    roles = {
        re.sub(r"^(layers|mtp)\.\d+\.", "", ref.name): ref
        for ref in plan().of_life(Life.WEIGHT)
        if ref.name not in known
    }
    return list(roles.values())


def sampled(ref: Ref, rank: int = 0) -> F32:
    """Values of its first rows."""
    fan = ref.shape[-1]
    first = weight_contents(ref, rank)[0]
    if isinstance(first, Normal):
        return first.values(SAMPLE * fan)
    codes, scales = weight_contents(ref, rank)
    assert isinstance(codes, Codes)
    assert isinstance(scales, Codes)
    rows = 2 if ref.dtype == "fp8" else SAMPLE
    width = fan // (2 if ref.dtype == "fp4" else 1)
    return dequantise(
        ref.dtype,
        codes.bytes(SAMPLE * width).reshape(SAMPLE, width),
        scales.bytes(rows * (fan // 32)).reshape(rows, fan // 32),
    )


@pytest.mark.parametrize("ref", weights(), ids=lambda ref: ref.name)
def test_every_weight_of_the_released_model_is_known_and_plausible(ref: Ref) -> None:
    values = sampled(ref)
    assert np.isfinite(values).all()
    assert np.array_equal(values, sampled(ref)), "the same name gives the same weight"
    if weight_contents(ref)[0] != weight_contents(ref, 1)[0] and values.any():
        assert not np.array_equal(values, sampled(ref, rank=1))


@pytest.mark.parametrize(
    ("name", "gain"),
    [("layers.3.attn.wq_a", 1.6), ("layers.7.ffn.experts.w1", 1.5), ("layers.7.ffn.gate", 2.9)],
)
def test_matrices_have_the_measured_spread(name: str, gain: float) -> None:
    ref = next(r for r in plan().of_life(Life.WEIGHT) if r.name == name)
    spread = sampled(ref).std() * ref.shape[-1] ** 0.5
    assert spread == pytest.approx(gain, rel=0.03)


def test_layers_differ() -> None:
    refs = {r.name: r for r in plan().of_life(Life.WEIGHT)}
    one, other = (sampled(refs[f"layers.{n}.attn.wq_a"]) for n in (3, 4))
    assert abs(np.mean(one * other)) < 0.02 * one.std() * other.std()


def test_a_weight_without_statistics_is_named() -> None:
    with pytest.raises(WeightsError, match=r"layers\.0\.attn\.new\[4,32\]:fp8"):
        weight_contents(Ref("layers.0.attn.new", (4, 32), "fp8", Life.WEIGHT))


def test_codes_hold_no_nan() -> None:
    for ref in plan().of_life(Life.STATE):
        if ref.dtype != "u8":
            continue
        content = state_content(ref)
        assert isinstance(content, Codes)
        table = np.frombuffer(content.table, np.uint8)
        if ref.name.endswith(("ring_codes", "main_scales")):
            assert np.isfinite(E4M3[table]).all(), ref
        elif "scales" in ref.name:
            assert np.isfinite(E8M0[table]).all(), ref
            assert table.max() < 255


def test_state_of_every_prefill_mode_is_known() -> None:
    model = tiny_model()
    build = Build(model, Capacity(2, 256), block=model.draft_block)
    for mode in ("ced20", "ced21"):
        for made in (build_encode(build, mode, 136, 16), build_replay(build, mode, 136)):
            for ref in made.of_life(Life.STATE):
                if ref.dtype != "i32":
                    state_content(ref)
    with pytest.raises(WeightsError, match="no synthetic contents"):
        state_content(Ref("L0.attn.other", (2, 4), "u8", Life.STATE))


def test_computed_constants_are_the_real_ones_with_a_token_map_of_the_right_range() -> None:
    model = release_model()
    known = constants(model)
    refs = {r.name: r for r in plan().of_life(Life.WEIGHT)}
    for name, value in known.items():
        assert value.shape == refs[name].shape
    assert known["layers.1.engram.primes"].sum() == model.engram_rows[0]
    tokens = known["engram.token_map"]
    assert (tokens.min(), tokens.max()) == (0, model.engram_vocab - 1)


def test_kindred_tokens_share_a_direction() -> None:
    rows = (kindred_rows(5120).astype(np.uint32) << 16).view(np.float32)
    assert rows.shape == (len(KINDRED), 5120)
    assert rows.std() == pytest.approx(EMBEDDING_RMS, rel=0.02)
    alike = np.atleast_2d(np.corrcoef(rows))[np.triu_indices(len(rows), 1)]
    assert alike.mean() == pytest.approx(KINSHIP, abs=0.03)


def test_normal_values_are_normal() -> None:
    values = Normal(7, 2.0, 0.5).values(100_001)
    assert values.shape == (100_001,)
    assert values.mean() == pytest.approx(2.0, abs=0.01)
    assert values.std() == pytest.approx(0.5, rel=0.01)
    assert np.quantile(values, 0.975) == pytest.approx(2.98, abs=0.02)
