"""`Model` from both configuration files, and every contradiction in one sentence."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.golden_plans import tiny_model
from helpers.official_config import OFFICIAL_FLAT
from helpers.tiny import TINY_A
from ultraflash.graphs.errors import ConfigError, WorldError
from ultraflash.graphs.model import Model
from ultraflash.graphs.release import RELEASE_CONFIG, release_model

CHECKPOINT = TINY_A / "ckpt"
NESTED: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text())
FLAT: dict[str, Any] = json.loads((CHECKPOINT / "inference" / "config.json").read_text())


def copy(tree: dict[str, Any]) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(tree))
    return again


# --- the two files ---


def test_values_of_the_release() -> None:
    """A few of every table of model.md section 1, typed from there."""
    m = release_model()
    assert (m.vocab, m.hidden, m.num_layers, m.heads, m.head_dim) == (129280, 5120, 40, 64, 512)
    assert (m.rope_dim, m.q_rank, m.o_groups, m.o_rank, m.window) == (64, 1280, 8, 1024, 128)
    assert m.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    assert m.kv_sources == (2, 8, 14, 20)
    assert m.index_sources == (2, 8, 14, 20, 24, 28, 32, 36)
    assert (m.index_heads, m.index_dim, m.index_topk) == (32, 128, 512)
    assert (m.candidate_source, m.candidate_blocks, m.candidate_block_size) == (20, 2048, 8)
    assert (m.norm_eps, m.hc_eps, m.hc, m.sinkhorn_iters) == (1e-20, 1e-6, 4, 20)
    assert (m.experts, m.shared_experts, m.active_experts, m.expert_width) == (384, 1, 6, 2304)
    assert (m.route_scale, m.swiglu_limit) == (1.5, 10.0)
    assert (m.rope_theta, m.compress_rope_theta) == (10000, 160000)
    assert (m.yarn_original, m.yarn_factor) == (65536, 16)
    assert (m.yarn_beta_fast, m.yarn_beta_slow, m.max_position) == (32, 1, 1048576)
    assert (m.engram_layers, m.engram_rows) == ((1, 14), (384006168, 384016682))
    assert (m.engram_max_order, m.engram_base, m.engram_heads, m.engram_dim) == (
        4,
        16000000,
        8,
        256,
    )
    assert (m.engram_pad, m.engram_vocab) == (2, 99092)
    assert (m.draft_stages, m.draft_block, m.draft_noise) == (3, 5, 128799)
    assert (m.draft_targets, m.draft_markov_rank) == ((37, 38, 39), 256)
    assert (m.draft_experts, m.draft_active_experts) == (128, 3)
    assert (m.bos, m.eos, m.pad, m.image_token) == (0, 1, 2, 129264)
    assert (m.vision_layers, m.vision_dim, m.vision_heads, m.vision_width) == (32, 1024, 16, 2816)
    assert (m.vision_patch, m.vision_downsample, m.vision_max_tokens) == (14, 3, 1024)
    assert m.vision_min_pixels == 295936


def test_derived_sizes_of_the_release() -> None:
    m = release_model()
    assert m.heads_per_group == 8
    assert (m.engram_orders, m.engram_columns) == (3, 24)
    assert m.tap_width == 15360
    assert m.index_scale == 2.0**-6
    assert m.decoder_start == 20


def test_both_files_of_the_release_give_the_same_model() -> None:
    assert Model.from_config(None, OFFICIAL_FLAT) == release_model()


def test_both_files_of_the_tiny_model_give_the_same_model() -> None:
    """But for the context, which only the nested file states."""
    nested, flat = Model.from_config(NESTED), Model.from_config(None, FLAT)
    assert nested.max_position == 256
    assert replace(flat, max_position=256) == nested


def test_the_nested_file_comes_first_and_the_flat_one_fills_gaps() -> None:
    nested, flat = copy(NESTED), copy(FLAT)
    nested["text_config"]["swiglu_limit"] = 7.0
    flat["swiglu_limit"] = 8.0
    del nested["text_config"]["routed_scaling_factor"]
    flat["route_scale"] = 2.5
    m = Model.from_config(nested, flat)
    assert (m.swiglu_limit, m.route_scale) == (7.0, 2.5)


def test_a_gap_that_is_filled_and_a_difference_are_told(caplog: pytest.LogCaptureFixture) -> None:
    Model.from_checkpoint(CHECKPOINT)
    assert not caplog.messages, "files that agree"
    nested = copy(NESTED)
    nested["text_config"]["swiglu_limit"] = 7.5
    del nested["text_config"]["routed_scaling_factor"]
    for _ in range(2):
        Model.from_config(nested, FLAT)
    assert caplog.messages == [
        "config.json lacks text_config.routed_scaling_factor: route_scale = 1.5 of "
        "inference/config.json is taken",
        "config.json says text_config.swiglu_limit = 7.5 and holds; inference/config.json says "
        f"swiglu_limit = {FLAT['swiglu_limit']}",
    ], "each once"


def test_absent_vision_is_no_vision() -> None:
    nested = copy(NESTED)
    del nested["vision_config"]
    assert Model.from_config(nested).vision_layers == 0


def test_a_checkpoint_folder_with_either_file_or_both(tmp_path: Path) -> None:
    assert Model.from_checkpoint(CHECKPOINT) == Model.from_config(NESTED, FLAT)
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(FLAT))
    assert Model.from_checkpoint(tmp_path) == Model.from_config(None, FLAT)
    (tmp_path / "config.json").write_text(json.dumps(NESTED))
    assert Model.from_checkpoint(tmp_path) == Model.from_config(NESTED)


# --- what is refused: files ---


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json: give the folder"):
        Model.from_checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"holds no config\.json: give the folder"):
        Model.from_checkpoint(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"holds no config\.json: give the folder"):
        Model.from_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[1]", "should hold a JSON object"),
        (b"{}", "config.json lacks text_config.vocab_size, text_config.hidden_size"),
        (b'{"text_config": 5}', "config.json lacks text_config.vocab_size"),
    ],
)
def test_a_damaged_file(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        Model.from_checkpoint(tmp_path)


@pytest.mark.parametrize("nested", [{}, {"text_config": 5}, {"model_type": "llama"}])
def test_another_models_file_is_not_passed_over(nested: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Model.from_config(nested, FLAT)
    assert str(caught.value) == (
        "config.json has no object text_config, it is damaged or another model's: restore it, or "
        "remove it so that inference/config.json holds"
    )


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("norm_topk_prob", False, True),
        ("gate_temp", 0.5, 1.0),
        ("hidden_act", "gelu", "silu"),
        ("topk_method", "greedy", "noaux_tc"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(key: str, value: Any, supported: Any) -> None:
    nested, flat = copy(NESTED), copy(FLAT)
    nested["text_config"][key] = flat[key] = supported
    assert Model.from_config(nested, flat) == tiny_model()
    for file, name, tree in (
        ("config.json", f"text_config.{key}", nested),
        ("inference/config.json", key, flat),
    ):
        changed = tree.get("text_config", tree)
        changed[key] = value
        with pytest.raises(ConfigError) as caught:
            Model.from_config(nested, flat)
        changed[key] = supported
        assert str(caught.value) == (
            f"{file} says {name} = {value!r}, and only {supported!r} is computed here: take a "
            "checkpoint that was trained so"
        )


def test_a_rope_of_another_type_is_refused() -> None:
    nested = copy(NESTED)
    nested["text_config"]["rope_scaling"]["rope_type"] = "linear"
    with pytest.raises(ConfigError, match=r"rope_scaling\.rope_type = 'linear', and only 'yarn'"):
        Model.from_config(nested)


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Model.from_checkpoint(tmp_path)


def test_every_missing_key_is_named() -> None:
    nested = copy(NESTED)
    del nested["text_config"]["hidden_size"], nested["text_config"]["rope_scaling"]["factor"]
    with pytest.raises(ConfigError) as caught:
        Model.from_config(nested)
    names = ["text_config.hidden_size", "text_config.rope_scaling.factor"]
    assert (
        str(caught.value)
        == f"config.json lacks {', '.join(names)}; was it written for another model?"
    )


NO_NUMBER: list[Any] = ["5", True, [], {}, float("nan")]
NO_COUNT: list[Any] = [*NO_NUMBER, 5.5, float("inf")]
NO_LAYERS: list[Any] = [2, "2", [2.5], [True], ["2"]]
WRONG = [
    *(("hidden_size", value) for value in NO_COUNT),
    *(("swiglu_limit", value) for value in NO_NUMBER),
    *(("kv_source_layer_ids", value) for value in NO_LAYERS),
    ("scoring_func", 3),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_value_of_the_wrong_type(key: str, value: Any) -> None:
    nested = copy(NESTED)
    nested["text_config"][key] = value
    with pytest.raises(ConfigError, match=rf"^config value text_config.{key} should be .*, got "):
        Model.from_config(nested)


def test_a_whole_number_may_be_written_as_a_fraction() -> None:
    nested = copy(NESTED)
    nested["text_config"]["hidden_size"] = 256.0
    m = Model.from_config(nested)
    assert m == tiny_model()
    assert type(m.hidden) is int


# --- what is refused: contradictions ---

TINY = tiny_model()
RATIOS = TINY.compress_ratios

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"heads": 9}, "heads 9 are not a multiple of output groups 2"),
    ({"rope_dim": 15}, "rope dims 15 do not fit head dim 64"),
    ({"rope_dim": 96}, "rope dims 96 do not fit head dim 64"),
    ({"rope_dim": 34}, "rope dims 34 do not fit index dim 32"),
    ({"rope_theta": 1.0}, "rope thetas must be above 1"),
    ({"yarn_factor": 0.0}, "the YaRN factor above 0"),
    ({"yarn_beta_slow": 0.0}, "YaRN betas 32.0 and 0.0 must be above 0"),
    ({"index_heads": 4}, "index heads x dim 128 is not a power of 4"),
    ({"index_heads": 6}, "index heads x dim 192 is not a power of 4"),
    ({"hidden": 272}, "hidden 272 is not a multiple of the quantisation group 32"),
    ({"q_rank": 40}, "q rank 40 is not a multiple"),
    ({"expert_width": 48}, "expert width 48 is not a multiple"),
    ({"engram_dim": 16}, "engram dim 16 is not a multiple"),
    ({"o_rank": 8}, "output groups x rank 16 is not a multiple"),
    ({"compress_ratios": RATIOS[:-1]}, "12 compress ratios for 10 layers and 3 draft stages"),
    ({"compress_ratios": (0, 0, 2, 2, 4, *RATIOS[5:])}, "compress ratios [0, 1, 2, 4] beyond"),
    ({"compress_ratios": (0, 0, 2, 1, *RATIOS[4:])},
     "layer 3 has compress ratio 1, its KV source 2 has 2"),
    ({"compress_ratios": (0, 1, *RATIOS[2:])},
     "layer 1 has compress ratio 1 but no KV source at or below"),
    ({"compress_ratios": (*RATIOS[:8], 0, *RATIOS[9:])}, "index source 8 has compress ratio 0"),
    ({"kv_sources": ()}, "there is no KV source"),
    ({"kv_sources": (2, 3, 6)}, "a KV source is no index source"),
    ({"kv_sources": (4, 2, 6)}, "KV source layers [4, 2, 6] are not ascending numbers below 10"),
    ({"kv_sources": (2, 2, 4, 6)}, "KV source layers [2, 2, 4, 6] are not ascending"),
    ({"index_sources": (2, 4, 6, 10)}, "index source layers [2, 4, 6, 10] are not ascending"),
    ({"candidate_source": 7}, "the candidate source is no index source"),
    ({"candidate_source": 4}, "the pool of candidate source 4 holds no entries of KV source 6"),
    ({"candidate_blocks": 2}, "2 candidate blocks of 4 cannot hold top-k 8"),
    ({"engram_layers": (1,)}, "engram layers and table sizes differ in number"),
    ({"engram_layers": (1, 10)}, "Engram layers [1, 10] are not ascending numbers below 10"),
    ({"engram_max_order": 1}, "Engram needs n-grams of 2 and a head, not 1 and 2"),
    ({"draft_targets": (7, 8, 12)}, "draft target layers [7, 8, 12] are not ascending"),
    ({"score_function": "softmax"}, "gate score 'softmax' is unknown (sqrtsoftplus only)"),
    ({"active_experts": 9}, "top-9 of 8 experts"),
    ({"draft_active_experts": 5}, "top-5 of 4 draft experts"),
    ({"shared_experts": 2}, "2 shared experts (one only)"),
    ({"eos": 512}, "eos token 512 is not in the vocabulary of 512"),
    ({"pad": -1}, "pad token -1 is not in the vocabulary"),
    ({"draft_noise": 600}, "draft noise token 600 is not in the vocabulary"),
    ({"image_token": 512}, "image token 512 is not in the vocabulary"),
    *(({name: 0}, f"{name} is 0; sizes are at least 1") for name in ("o_groups", "window")),
    ({"hc": -1, "heads": 0}, "heads is 0; hc is -1; sizes are at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "text"), CONTRADICTIONS, ids=[str(change) for change, _ in CONTRADICTIONS]
)
def test_a_contradiction(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(TINY, **change)
    message = str(caught.value)
    assert message.startswith("model configuration does not work: ")
    assert text in message
    assert "\n" not in message


def test_all_contradictions_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(TINY, heads=9, active_experts=9, hidden=272)
    for text in ("heads 9", "top-9", "hidden 272"):
        assert text in str(caught.value)


def test_no_number_ends_in_a_traceback() -> None:
    """Whatever stands in the file: a model, or one sentence."""
    for f in fields(Model):
        numbers: dict[str, tuple[Any, ...]] = {
            "int": (0, -1, 1, 3, 10**30),
            "float": (0.0, -1.0, 1e300),
        }
        for value in numbers.get(str(f.type), ()):
            change: dict[str, Any] = {f.name: value}
            with contextlib.suppress(ConfigError):
                replace(TINY, **change)


def test_an_image_token_may_be_absent() -> None:
    assert replace(TINY, image_token=-1).image_token == -1


# --- roles of layers (model.md 4.9) ---


def test_sources_of_the_release() -> None:
    m = release_model()
    for layers, kv in (
        (range(2, 8), 2),
        (range(8, 14), 8),
        (range(14, 20), 14),
        (range(20, 40), 20),
    ):
        assert {m.kv_source(layer) for layer in layers} == {kv}
    reuse = {2: 2, 7: 2, 8: 8, 13: 8, 14: 14, 19: 14, 20: 20, 23: 20, 24: 24, 27: 24, 28: 28,
             31: 28, 32: 32, 35: 32, 36: 36, 39: 36}  # fmt: skip
    assert {layer: m.index_source(layer) for layer in reuse} == reuse
    assert [m.ratio(layer) for layer in (0, 1, 2, 19, 20, 39)] == [0, 0, 2, 2, 1, 1]


# --- worlds ---


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_worlds_of_the_release(world: int) -> None:
    release_model().check_world(world)


@pytest.mark.parametrize(
    ("world", "named"),
    [
        (3, ["attention heads (64)", "output groups (8)", "output groups x rank / 32 (256)",
             "index heads (32)", "vocabulary (129280)"]),
        (16, ["output groups (8)", "expert width / 32 (72)"]),
        (64, ["output groups (8)", "index heads (32)", "expert width / 32 (72)"]),
    ],
)  # fmt: skip
def test_a_world_that_does_not_divide(world: int, named: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        release_model().check_world(world)
    message = str(caught.value)
    assert message.startswith(f"world {world} does not divide {named[0]}")
    assert message.endswith("; this model can be split over [1, 2, 4, 8]")
    divided = message.partition(";")[0]
    for text in named:
        assert text in divided
    assert divided.count("(") == len(named)


def test_a_rank_needs_whole_groups_of_32_in_front_of_wo_b() -> None:
    """Two output groups of rank 16 share a scale: they cannot go to two ranks."""
    m = replace(TINY, o_rank=16)
    m.check_world(1)
    with pytest.raises(WorldError, match=r"output groups x rank / 32 \(1\)"):
        m.check_world(2)


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_below_one(world: int) -> None:
    with pytest.raises(WorldError, match=f"world must be at least 1, got {world}"):
        TINY.check_world(world)


def test_a_model_is_a_value() -> None:
    assert Model.from_config(RELEASE_CONFIG) == release_model()
    assert hash(Model.from_config(RELEASE_CONFIG)) == hash(release_model())
