"""Compressed ids as the reference builds them; special ids against the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from helpers.checkpoints import GOLDEN, bundled_model, copy_bundled
from ultraflash.graphs.model import Model
from ultraflash.graphs.release import release_model
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights import build_token_map, check_special_ids
from ultraflash.runtime.weights.token_map import SPECIAL_TOKENS, compressed_ids

TOKENIZER = GOLDEN / "ckpt" / "tokenizer.json"
BUNDLED_TOKENIZER = BUNDLED_CHECKPOINT / "tokenizer.json"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_checkpoint(GOLDEN / "ckpt")


def test_equals_the_reference(model: Model, tmp_path: Path) -> None:
    golden = load_file(GOLDEN / "expected" / "engram_hash.safetensors")["tiny.token_map"]
    assert np.array_equal(build_token_map(TOKENIZER, model, tmp_path), golden)
    assert np.array_equal(build_token_map(TOKENIZER, model, None), golden)


def test_the_bundled_tokenizer_gives_what_its_configuration_says() -> None:
    token_map = build_token_map(BUNDLED_TOKENIZER, bundled_model(), None)
    assert token_map.max() + 1 == bundled_model().engram_vocab
    assert token_map[2] == 2


def test_case_accents_and_space_are_folded() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_TOKENIZER))
    token_map = compressed_ids(tokenizer)

    def number(spelling: str) -> int:
        return int(token_map[tokenizer.token_to_id(spelling)])

    assert number("The") == number("\u0120the") == number("\u0120The")
    assert number("a") == number("A") != number("b")
    # A lone space is a text of its own; a newline becomes one.
    assert number("\u0120") == number("\u010a") != number("a")


def test_a_second_call_reads_the_cache(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_token_map(TOKENIZER, model, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(
        "ultraflash.runtime.weights.token_map.compressed_ids", lambda _: pytest.fail("built again")
    )
    assert np.array_equal(build_token_map(TOKENIZER, model, tmp_path), first)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY rubbish", b"not an array"])
def test_a_damaged_cache_is_built_again(model: Model, tmp_path: Path, content: bytes) -> None:
    first = build_token_map(TOKENIZER, model, tmp_path)
    (cached,) = tmp_path.iterdir()
    cached.write_bytes(content)
    assert np.array_equal(build_token_map(TOKENIZER, model, tmp_path), first)
    assert np.array_equal(np.load(cached), first)


def test_a_cache_that_cannot_be_written_costs_only_a_warning(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert build_token_map(TOKENIZER, model, tmp_path / "gone").shape == (512,)
    assert "token map not kept in" in caplog.text


def test_ids_beyond_the_tokenizer_count_as_padding(model: Model) -> None:
    token_map = build_token_map(TOKENIZER, replace(model, vocab=520), None)
    assert token_map.shape == (520,)
    assert (token_map[512:] == token_map[2]).all()


def test_another_number_of_compressed_ids(model: Model, tmp_path: Path) -> None:
    wrong = replace(model, engram_vocab=434)
    for cache in (None, tmp_path, tmp_path):
        with pytest.raises(WeightsError, match=r"gives 435 compressed ids but .* is 434"):
            build_token_map(TOKENIZER, wrong, cache)


def test_a_tokenizer_with_more_ids_than_the_model(model: Model) -> None:
    with pytest.raises(WeightsError, match="has 512 ids but the model's vocabulary is 500"):
        build_token_map(TOKENIZER, replace(model, vocab=500, image_token=-1), None)


@pytest.mark.parametrize("folder", [GOLDEN / "ckpt", BUNDLED_CHECKPOINT])
def test_special_ids_agree(folder: Path) -> None:
    check_special_ids(folder / "tokenizer.json", Model.from_checkpoint(folder))


@pytest.mark.parametrize(
    ("field", "key", "spelling"),
    [
        ("bos", "bos_token_id", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"),
        ("eos", "eos_token_id", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        ("pad", "pad_token_id", "<\uff5c\u2581pad\u2581\uff5c>"),
        ("draft_noise", "dspark_noise_token_id", "<\uff5cSystem\uff5c>"),
        ("image_token", "image_token_id", "<\uff5cdeepseek_image\uff5c>"),
    ],
)
def test_a_special_id_that_differs(field: str, key: str, spelling: str) -> None:
    model = bundled_model()
    change: dict[str, Any] = {field: 77}
    wrong = replace(model, **change)
    with pytest.raises(WeightsError) as caught:
        check_special_ids(BUNDLED_TOKENIZER, wrong)
    assert f"{key} is 77 but {spelling} has id {getattr(model, field)}" in str(caught.value)


def test_all_that_differ_are_in_one_error() -> None:
    wrong = replace(bundled_model(), bos=5, eos=6)
    with pytest.raises(WeightsError, match=r"bos_token_id is 5 .*; eos_token_id is 6 "):
        check_special_ids(BUNDLED_TOKENIZER, wrong)


def test_swapped_turn_openers_of_the_released_vocabulary(tmp_path: Path) -> None:
    model = release_model()
    ids = {spelling: getattr(model, field) for spelling, field, _ in SPECIAL_TOKENS}
    openers = {"<\uff5cUser\uff5c>": 128_803, "<\uff5cAssistant\uff5c>": 128_804}
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel(ids | openers, unk_token="?")).save(str(path))
    check_special_ids(path, model)
    swapped = dict(zip(openers, reversed(openers.values()), strict=True))
    Tokenizer(models.WordLevel(ids | swapped, unk_token="?")).save(str(path))
    with pytest.raises(
        WeightsError, match=r"User.* is 128803 in the released model and has id 128804"
    ):
        check_special_ids(path, model)


def test_no_image_token_is_needed_without_vision() -> None:
    check_special_ids(BUNDLED_TOKENIZER, replace(bundled_model(), vision_layers=0, image_token=-1))


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"model": 3}'])
def test_a_tokenizer_that_is_none(tmp_path: Path, content: str | None) -> None:
    path = copy_bundled(tmp_path) / "tokenizer.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(WeightsError, match=r"tokenizer.json (cannot be read|is no tokenizer)"):
        check_special_ids(path, bundled_model())
