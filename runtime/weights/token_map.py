"""What the engine must know of `tokenizer.json`: compressed ids for the Engram hash, special ids.

The compressed ids follow model.md section 4.3: tokens whose texts differ only in case, accents or
surrounding space share one id, numbered as they are first met.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tokenizers import Regex, Tokenizer, normalizers

from ultraflash.graphs.model import Model
from ultraflash.runtime.content import Marks
from ultraflash.runtime.errors import WeightsError

log = logging.getLogger(__name__)

_CACHE_VERSION = 1
_LONE_SPACE = "\ue000"  # a private character that keeps a single space from being stripped away

# Spelling in tokenizer.json, the field of `Model` that must name the same id, and its config key.
SPECIAL_TOKENS = (
    ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "bos", "bos_token_id"),
    ("<\uff5cend\u2581of\u2581sentence\uff5c>", "eos", "eos_token_id"),
    ("<\uff5c\u2581pad\u2581\uff5c>", "pad", "pad_token_id"),
    ("<\uff5cSystem\uff5c>", "draft_noise", "dspark_noise_token_id"),
    ("<\uff5cdeepseek_image\uff5c>", "image_token", "image_token_id"),
)
_ASSISTANT, _USER = "<\uff5cAssistant\uff5c>", "<\uff5cUser\uff5c>"
# No configuration names these two, so the vocabulary of this size is known by them.
_RELEASED_VOCAB = 129_280
_RELEASED_IDS = ((_USER, 128_803), (_ASSISTANT, 128_804))


def build_token_map(
    tokenizer_json: Path, model: Model, cache_dir: Path | None
) -> npt.NDArray[np.int64]:
    """Compressed id of every raw id, int64 [vocab]; ids beyond the tokenizer count as padding.

    The result is kept in `cache_dir` (None: nowhere) under the BLAKE3 digest of the tokenizer file.

    Raises:
        WeightsError: when the tokenizer cannot be read, has more ids than the model, or gives
            another number of compressed ids than the configuration says.
    """
    content = _read(tokenizer_json)
    key = blake3(content).hexdigest()
    cached = cache_dir and cache_dir / f"token_map-{_CACHE_VERSION}-{key[:32]}-{model.vocab}.npy"
    if cached:
        known = _load(cached, model.vocab)
        if known is not None:
            return _checked(known, tokenizer_json, model)
    token_map = compressed_ids(_parse(content, tokenizer_json))
    if len(token_map) > model.vocab:
        raise WeightsError(
            f"{tokenizer_json} has {len(token_map)} ids but the model's vocabulary is "
            f"{model.vocab}: take tokenizer and weights from the same checkpoint"
        )
    rest = np.full(model.vocab - len(token_map), token_map[model.engram_pad], np.int64)
    token_map = np.concatenate([token_map, rest])
    _checked(token_map, tokenizer_json, model)
    if cached:
        _store(cached, token_map)
    return token_map


def compressed_ids(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Compressed id of every id of the tokenizer, int64 [its size]."""
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    ).normalize_str
    numbers: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    token_map = np.empty(size, np.int64)
    for token in range(size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # Parts of a character all decode to the same replacement character: only spelling differs.
        key = str(tokenizer.id_to_token(token)) if "\ufffd" in text else normalise(text) or text
        token_map[token] = numbers.setdefault(key, len(numbers))
    return token_map


def check_special_ids(tokenizer_json: Path, model: Model) -> None:
    """Compare the special ids of the configuration with those of the tokenizer.

    Raises:
        WeightsError: one for all that differ, with both ids.
    """
    tokenizer = _parse(_read(tokenizer_json), tokenizer_json)
    wrong = []
    for spelling, field, key in SPECIAL_TOKENS:
        configured, found = getattr(model, field), tokenizer.token_to_id(spelling)
        if field == "image_token" and configured < 0:
            continue  # a checkpoint without vision needs no image token
        if configured != found:
            wrong.append(f"{key} is {configured} but {spelling} has id {found}")
    for spelling, released in _RELEASED_IDS if model.vocab == _RELEASED_VOCAB else ():
        found = tokenizer.token_to_id(spelling)
        if found != released:
            wrong.append(f"{spelling} is {released} in the released model and has id {found}")
    if wrong:
        raise WeightsError(
            f"{tokenizer_json} does not belong to this config.json: {'; '.join(wrong)}; "
            f"take both from the same checkpoint"
        )


def turn_marks(tokenizer_json: Path, model: Model) -> Marks:
    """The special ids at which conversations are cut.

    Raises:
        WeightsError: when the tokenizer cannot be read or lacks one of them.
    """
    tokenizer = _parse(_read(tokenizer_json), tokenizer_json)
    found = {spelling: tokenizer.token_to_id(spelling) for spelling in (_ASSISTANT, _USER)}
    if lacking := [spelling for spelling, token in found.items() if token is None]:
        raise WeightsError(
            f"{tokenizer_json} has no {' and no '.join(lacking)}: "
            f"take the file that came with the checkpoint"
        )
    return Marks(model.eos, found[_ASSISTANT], found[_USER])


def _checked(
    token_map: npt.NDArray[np.int64], tokenizer_json: Path, model: Model
) -> npt.NDArray[np.int64]:
    count = int(token_map.max()) + 1
    if count != model.engram_vocab:
        raise WeightsError(
            f"{tokenizer_json} gives {count} compressed ids but engram_compressed_vocab_size is "
            f"{model.engram_vocab}: take tokenizer and config.json from the same checkpoint"
        )
    return token_map


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read ({error.strerror}): the checkpoint folder must hold it"
        ) from error


def _parse(content: bytes, path: Path) -> Any:
    try:
        json.loads(content)
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise WeightsError(f"{path} is no tokenizer ({error}): fetch it again") from error


def _load(path: Path, vocab: int) -> npt.NDArray[np.int64] | None:
    """The cached map, or None when there is none or it is damaged: it can always be built again."""
    try:
        value = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    sound = value.dtype == np.int64 and value.shape == (vocab,)
    return value if sound else None


def _store(path: Path, token_map: npt.NDArray[np.int64]) -> None:
    # Written aside and renamed, so that a second process never reads half a file.
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as stream:
            np.save(stream, token_map)
        os.replace(stream.name, path)
    except OSError as error:  # the map is right all the same, only the next start is slower
        log.warning("token map not kept in %s: %s", path.parent, error.strerror)
