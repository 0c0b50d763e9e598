"""Content ids, prefix keys, and where a prompt may resume."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import bundled_model, copy_bundled
from helpers.properties import examples
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.content import (
    Marks,
    PrefixKeys,
    answer_start,
    content_ids,
    image_digest,
    resume_ends,
    system_end,
)
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.request import ImageSpan
from ultraflash.runtime.weights.token_map import turn_marks

BOS, EOS, USER, ASSISTANT, IMAGE = 0, 1, 490, 491, 511
MARKS = Marks(EOS, ASSISTANT, USER)
tokens = st.lists(st.sampled_from([3, 4, 5, EOS, USER, ASSISTANT]), min_size=1, max_size=60)


def keys_of(ids: list[int], *images: ImageSpan, salt: str = "", fp: str = "f") -> list[bytes]:
    """The keys of all prefixes."""
    keys = PrefixKeys(fp, salt, content_ids(ids, images))
    return [keys.at(end) for end in range(len(ids) + 1)]


# --- content ids ---


def test_a_text_token_is_its_id() -> None:
    content = content_ids([0, 7, 129279])
    assert content.dtype == np.dtype("<u8")
    assert content.tolist() == [0, 7, 129279]


def test_image_positions_have_ids_of_their_own() -> None:
    digest = image_digest(b"a picture", preprocessing=1)
    content = content_ids([5, *[IMAGE] * 4, 6], [ImageSpan(1, 4, digest)])
    assert content[[0, 5]].tolist() == [5, 6]
    assert (content[1:5] >> np.uint64(63) == 1).all()
    assert len(set(content.tolist())) == 6
    # Word j of the extended digest, as the format says, whatever the length.
    for j in range(4):
        (word,) = struct.unpack("<Q", blake3(digest).digest(length=8, seek=8 * j))
        assert int(content[1 + j]) == word | 1 << 63


def test_an_image_is_its_bytes_and_the_way_they_become_rows() -> None:
    seen = {image_digest(data, version) for data in (b"x", b"y", b"") for version in (1, 2)}
    assert len(seen) == 6
    assert image_digest(b"x", 1) == image_digest(b"x", 1)


def test_two_pictures_of_one_size_part_at_their_first_position() -> None:
    ids = [5, 6, *[IMAGE] * 8, 7]
    spans = [ImageSpan(2, 8, image_digest(data, 1)) for data in (b"cat" * 99, b"dog" * 99)]
    cat, dog = (keys_of(ids, span) for span in spans)
    assert cat[:3] == dog[:3]
    assert not set(cat[3:]) & set(dog[3:])
    assert cat == keys_of(ids, spans[0])
    assert not set(keys_of(ids)[3:]) & {*cat, *dog}  # nor with the bare token ids


# --- keys ---


@examples(60)
@given(ids=st.lists(st.integers(0, 129279), max_size=50), data=st.data())
def test_keys_are_incremental(ids: list[int], data: st.DataObject) -> None:
    whole = keys_of(ids)
    ends = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    known = data.draw(st.integers(0, len(ids)))
    keys = PrefixKeys("f", "", content_ids(ids[:known]))
    for end in ends:
        if end > keys.length:
            keys.extend(content_ids(ids[keys.length : end]))
        assert keys.at(end) == whole[end]
    for end in ends:
        assert keys.at(end) == whole[end]  # again, in any order


@examples(100)
@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_ids_do(a: list[int], b: list[int]) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    common = min(len(a), len(b)) if common is None else common
    for end, (x, y) in enumerate(zip(keys_of(a), keys_of(b), strict=False)):
        assert (x == y) == (end <= common)


def test_fingerprint_and_salt_part_everything() -> None:
    variants = [("f", ""), ("g", ""), ("f", "s"), ("fs", ""), ("", "fs")]
    keys = [set(keys_of([1, 2, 3], fp=fp, salt=salt)) for fp, salt in variants]
    assert len(set().union(*keys)) == sum(map(len, keys))


# --- where a prompt may resume ---


def ends_of(ids: list[int], every: int) -> list[int]:
    return resume_ends(content_ids(ids), MARKS, every)


def begin_and_end(ids: list[int]) -> tuple[int, int]:
    content = content_ids(ids)
    return system_end(content, MARKS), answer_start(content, MARKS)


def test_candidates_of_a_conversation() -> None:
    turn = [USER, 3, 4, ASSISTANT, 5, 6, EOS]
    ids = [BOS, 3, *turn, *turn, USER, 3, ASSISTANT, 5]
    assert ends_of(ids, 10) == [18, 15, 12, 10, 8, 5, 2]
    assert begin_and_end(ids) == (2, 18)
    assert ends_of(ids[:19], 10)[0] == 18  # P - 1, not P
    assert ends_of(ids[:18], 10)[0] == 15


def test_a_prompt_without_marks() -> None:
    assert ends_of([3] * 20, 8) == [16, 8]
    assert ends_of([3] * 16, 8) == [8]
    assert ends_of([ASSISTANT], 8) == []
    assert begin_and_end([3]) == (0, 0)


@examples(200)
@given(tokens, st.integers(1, 20))
def test_candidates_are_what_the_rules_say(ids: list[int], every: int) -> None:
    before = {i for i, token in enumerate(ids) if token in (EOS, ASSISTANT)}
    system = {ids.index(USER)} if USER in ids else set()
    regular = {n for n in range(len(ids)) if n % every == 0}
    want = sorted((before | system | regular) - {0}, reverse=True)
    assert ends_of(ids, every) == want
    assert all(1 <= end <= len(ids) - 1 for end in want)


# --- the ids that cut ---


def test_marks_are_read_from_the_tokenizer() -> None:
    assert turn_marks(BUNDLED_CHECKPOINT / "tokenizer.json", bundled_model()) == MARKS


def test_a_tokenizer_without_marks_is_refused(tmp_path: Path) -> None:
    path = copy_bundled(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("｜Assistant｜", "｜Helper｜"), "utf-8")
    with pytest.raises(WeightsError, match=r"tokenizer\.json has no <｜Assistant｜>: take"):
        turn_marks(path, bundled_model())
