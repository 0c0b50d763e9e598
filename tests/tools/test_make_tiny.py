"""The tiny checkpoints: official layout, repeatable, split as promised, a working tokenizer."""

from __future__ import annotations

import filecmp
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deepseek_recipe import (
    Conversation,
    DeepseekV41Encoding,
    SpecialTokens,
    SystemMessage,
    ToolDefinition,
    UserMessage,
)
from deepseek_recipe import Tokenizer as RecipeTokenizer
from tokenizers import Tokenizer

from helpers.checkpoints import bundled_model
from ultraflash.graphs.model import Model
from ultraflash.graphs.release import RELEASE_CONFIG
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.weights import (
    CheckpointIndex,
    build_token_map,
    check_special_ids,
    load_weights,
)
from ultraflash.tools import make_tiny
from ultraflash.tools.tiny_tokenizer import (
    IMAGE,
    SMALLEST_VOCAB,
    TEXT,
    THOUGHT,
    special_id,
    successors,
    tokenizer_json,
)

MICRO = replace(
    make_tiny.TINY, num_layers=3, compress_ratios=(0, 2, 1, 0), kv_sources=(1, 2),
    index_sources=(1, 2), candidate_source=2, engram_layers=(1,), engram_rows=(0,),
    draft_stages=1, draft_targets=(2,), experts=4, active_experts=2, vision_layers=0,
)  # fmt: skip


def same_files(left: Path, right: Path) -> bool:
    names = sorted(p.relative_to(left) for p in left.rglob("*") if p.is_file())
    others = sorted(p.relative_to(right) for p in right.rglob("*") if p.is_file())
    return names == others and all(
        filecmp.cmp(left / name, right / name, shallow=False) for name in names
    )


def test_the_bundled_checkpoint_is_what_the_tool_writes(tmp_path: Path) -> None:
    assert make_tiny.main([str(tmp_path / "out")]) == 0
    assert same_files(tmp_path / "out", BUNDLED_CHECKPOINT)


def test_another_seed_gives_other_weights_and_the_same_rest(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny.make_tiny(tmp_path / name, MICRO, seed)
    assert same_files(tmp_path / "a", tmp_path / "b")
    a, c = (CheckpointIndex.open(tmp_path / name) for name in "ac")
    assert a.tensors.keys() == c.tensors.keys()
    assert not np.array_equal(a.raw("layers.0.attn.wkv.weight"), c.raw("layers.0.attn.wkv.weight"))
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "c/config.json").read_text()


def test_the_tp_preset_splits_over_eight(tmp_path: Path) -> None:
    assert make_tiny.main([str(tmp_path), "--preset", "tp", "--seed", "4"]) == 0
    model = Model.from_checkpoint(tmp_path)
    assert (model.heads, model.o_groups, model.index_heads, model.expert_width) == (16, 8, 8, 256)
    index = CheckpointIndex.open(tmp_path)
    for world in (1, 2, 4, 8):
        load_weights(index, model, world, ["layers.2.attn.wq_b", "layers.2.ffn.experts.w2"])


@pytest.mark.parametrize("preset", ["tiny", "tp"])
def test_section_8_of_the_specification(preset: str) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden/tiny-a/ckpt/config.json").read_text())
    theirs, ours = Model.from_config(golden), make_tiny.PRESETS[preset]
    free = {"max_position", "engram_rows", "engram_vocab", "draft_noise", "image_token"}
    free |= {"heads", "o_groups", "expert_width"} if preset == "tp" else set()
    for name, value in vars(theirs).items():
        if name not in free:
            assert getattr(ours, name) == value, name
    assert ours.max_position == 8192


def test_both_configuration_files_give_the_same_model() -> None:
    nested, flat = (
        json.loads((BUNDLED_CHECKPOINT / name).read_text(encoding="utf-8"))
        for name in ("config.json", "inference/config.json")
    )
    assert Model.from_config(nested) == bundled_model()
    assert Model.from_config(None, flat) == replace(bundled_model(), max_position=1048576)
    assert nested.keys() == RELEASE_CONFIG.keys()
    for part in ("text_config", "vision_config", "quantization_config"):
        assert nested[part].keys() == RELEASE_CONFIG[part].keys(), part


def test_a_configuration_file_is_followed(tmp_path: Path) -> None:
    nested, _ = make_tiny.config_files(replace(MICRO, vocab=600, bos=9, engram_vocab=3))
    (tmp_path / "wish.json").write_text(json.dumps(nested))
    out = tmp_path / "out"
    assert make_tiny.main([str(out), "--config", str(tmp_path / "wish.json")]) == 0
    model = Model.from_checkpoint(out)
    assert (model.vocab, model.num_layers, model.bos, model.image_token) == (600, 3, 0, -1)
    CheckpointIndex.open(out).verify(model)
    check_special_ids(out / "tokenizer.json", model)
    build_token_map(out / "tokenizer.json", model, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--seed", "-1"], "--seed must not be negative, got -1"),
        (["--config", "nowhere.json"], "nowhere.json cannot be used: No such file or directory"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert make_tiny.main([str(tmp_path / "out"), *arguments]) == 2
    assert capsys.readouterr().err.strip() == complaint


def test_a_configuration_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    for content, complaint in (("{", "c.json is not JSON"), ("{}", "config.json lacks")):
        path.write_text(content)
        assert make_tiny.main([str(tmp_path / "out"), "--config", str(path)]) == 2
        assert complaint in capsys.readouterr().err


def test_an_existing_checkpoint_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert make_tiny.main([str(tmp_path)]) == 2
    assert "holds a checkpoint already: choose another folder" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_vocabulary_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"of 100 is too small, {SMALLEST_VOCAB} is the least"):
        make_tiny.make_tiny(tmp_path, replace(MICRO, vocab=100))


# --- weights ---


def test_magnitudes_are_those_of_the_specification() -> None:
    weights = load_weights(CheckpointIndex.open(BUNDLED_CHECKPOINT), bundled_model(), 1)

    def gain(name: str) -> float:
        value = weights.host(name)
        return float(value.std() * value.shape[-1] ** 0.5)

    assert np.sqrt((weights.host("embed") ** 2).mean()) == pytest.approx(0.12, rel=0.02)
    for name, mean in (("attn_norm", 0.025), ("ffn_norm", 0.2), ("attn.q_norm", 0.97)):
        assert weights.host(f"layers.3.{name}").mean() == pytest.approx(mean, rel=0.1)
    for name, expected in (("attn.wq_a", 1.6), ("attn.wkv", 1.8), ("ffn.experts.w1", 1.5)):
        assert gain(f"layers.3.{name}") == pytest.approx(expected, rel=0.15)
    assert weights.host("layers.3.hc_attn_scale").min() > 0
    scales = CheckpointIndex.open(BUNDLED_CHECKPOINT).raw("layers.3.attn.wq_b.scale")
    assert len(np.unique(scales)) >= 3  # a scale read at the wrong place must show


# --- tokenizer ---


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json"))


def test_every_id_is_used_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))


@pytest.mark.parametrize("vocab", [SMALLEST_VOCAB, 300, 512, 2000])
def test_every_size_encodes_every_byte(vocab: int) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(vocab))
    assert tokenizer.get_vocab_size() == vocab
    for text in ("Grüße, 12345 天气 かな \U0001f642\n\n\t x", "".join(map(chr, range(256)))):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_pre_tokeniser_and_specials_are_those_of_the_golden_tokenizer() -> None:
    golden = Path(__file__).parents[1] / "golden/tiny-a/ckpt/tokenizer.json"
    theirs = json.loads(golden.read_text(encoding="utf-8"))
    ours = json.loads(tokenizer_json(512))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert ours[part] == theirs[part], part
    names = [{t["content"] for t in f["added_tokens"] if "holder" not in t["content"]}
             for f in (ours, theirs)]  # fmt: skip
    assert names[0] == names[1]


def test_its_own_sentences_are_one_token_a_word(tokenizer: Tokenizer) -> None:
    for text in (*TEXT, THOUGHT):
        words = text.replace(",", " ,").replace(".", " .").replace(":", " :").split()
        assert len(tokenizer.encode(text).ids) == len(words), text


def test_what_follows_what_can_end(tokenizer: Tokenizer) -> None:
    pairs = successors(tokenizer)
    follow: dict[int, set[int]] = {}
    for first, then in pairs:
        follow.setdefault(first, set()).add(then)
    think, end, stop = (
        special_id(tokenizer, spelling) for spelling in ("<think>", "</think>", ":")
    )
    reached: set[int] = set()
    edge = {think}
    while edge:
        reached |= edge
        edge = {then for token in edge for then in follow.get(token, ())} - reached
    assert {end, bundled_model().eos} <= reached
    # Only the thought leads to its end: an answer never contains it.
    assert [first for first, then in pairs if then == end] == [stop]


def test_deepseek_recipe_renders_and_encodes_with_it() -> None:
    encoding = (
        DeepseekV41Encoding()
        .with_tokenizer(RecipeTokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json")))
        .with_special_tokens(SpecialTokens(image=IMAGE))
    )
    model = bundled_model()
    plain = Conversation([UserMessage("2+2? <\uff5cUser\uff5c>")], thinking_mode=False)
    ids = encoding.encode(plain)
    assert ids[0] == model.bos
    assert max(ids) < model.vocab
    tools = [ToolDefinition("weather", "tells the weather", {"type": "object"})]
    long = encoding.encode(
        Conversation([SystemMessage("Be kind."), UserMessage("Hi")], tools=tools)
    )
    assert long[:2] == [model.bos, model.draft_noise]  # the noise id is spelt <|System|>
    user = RecipeTokenizer.from_file(str(BUNDLED_CHECKPOINT / "tokenizer.json")).encode(
        "<\uff5cUser\uff5c>"
    )
    assert ids.count(user[0]) == 1  # what a user types stays text
