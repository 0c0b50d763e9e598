"""A small byte-level BPE tokenizer in the official layout, made from sentences written for it.

Same alphabet, pre-tokeniser and special spellings as the release; every special token that
`deepseek-recipe` renders has an id. The same size always gives the same file, byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tokenizers import Regex, Tokenizer, pre_tokenizers

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
PAD = "<\uff5c\u2581pad\u2581\uff5c>"
SYSTEM = "<\uff5cSystem\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
THINK, THINK_END = "<think>", "</think>"
IMAGE = "<\uff5cdeepseek_image\uff5c>"

# First ids and last ids, in the order of the release (model.md 7.1).
_FIRST = (BOS, EOS, PAD)
_NAMES = (
    "System", "fim\u2581hole", "fim\u2581begin", "fim\u2581end", "User", "Assistant", "EOT",
    "think", "/think", "DSML", "latest_reminder", "action", "query", "authority", "domain",
    "title", "read_url",
    "ref", "/ref", "box", "/box", "point", "/point", "polygon", "/polygon", "deepseek_image",
)  # fmt: skip
_IRREGULAR = {"EOT": "<|EOT|>", "think": THINK, "/think": THINK_END, "DSML": "\uff5cDSML\uff5c"}
_LAST = tuple(_IRREGULAR.get(name, f"<\uff5c{name}\uff5c>") for name in _NAMES)
SMALLEST_VOCAB = len(_FIRST) + 256 + len(_LAST)

# The three splits of the release: digits, ideographs and kana, then everything else.
_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)

# Few words, often repeated: with some 220 merges nearly all of them become one token, so that a
# random model that knows which token follows which writes words and not letters.
TEXT = (
    "The small engine reads the weights and waits for a question.",
    "You ask a question and the engine writes one word after the other.",
    "Every word is a number, and every number is a row in the table.",
    "The row goes from layer to layer, and each layer adds a small part of the answer.",
    "One layer looks at the words near by, and the other looks at the words far back.",
    "The experts read the row, but only a few of the experts work on each word.",
    "The answer is only the next word, and the next word, and the next.",
    "The river runs from the hill to the sea, and the sea waits for the river.",
    "A boat goes down the river at night, and the moon is on the water.",
    "The light of the moon is small, but the boat looks for the light.",
    "Each night the wind writes on the water, and the water reads the wind.",
    "You see the moon and the sea, and the sea is far from the hill.",
    "The old man at the river tells a story, and every story is a boat.",
    "A story goes from man to man, and each man adds a word.",
    "The wind is old and the hill is old, but the story is new.",
    "This is a small model with random weights, and it tells a story with no end.",
    "The words are real but the story is random, and that is the point of this model.",
    "Ask it for the answer and it tells you of the river, the boat and the moon.",
)
# All words of the thought occur nowhere else: nothing but its end can be followed by </think>.
THOUGHT = "Let us think first:"


def train_merges(texts: tuple[str, ...], limit: int) -> list[tuple[str, str]]:
    """At most `limit` merges: the commonest pair first, equal ones in order of spelling."""
    # Once inside a paragraph and once at its start, where no space comes before the first word.
    words = Counter(tuple(p) for text in texts for p in (*_pieces(" " + text), *_pieces(text)))
    merges: list[tuple[str, str]] = []
    while len(merges) < limit:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merged(word, best): times for word, times in words.items()})
    return merges


def tokenizer_json(vocab: int) -> str:
    """The file `tokenizer.json` of exactly `vocab` ids.

    Ids: three specials, 256 bytes, merges, place holders where merges run out, other specials.

    Raises:
        ValueError: when the bytes and special tokens alone need more ids.
    """
    room = vocab - SMALLEST_VOCAB
    if room < 0:
        raise ValueError(f"a vocabulary of {vocab} is too small, {SMALLEST_VOCAB} is the least")
    merges = train_merges((*TEXT, THOUGHT), room)
    words = [*_FIRST, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    # Two pairs can spell the same word; each still needs an id of its own to keep the count.
    words = list(dict.fromkeys(words))
    fill = vocab - len(words) - len(_LAST)
    holders = [f"<\uff5cplace\u2581holder\u2581no\u2581{i}\uff5c>" for i in range(fill)]
    words += [*holders, *_LAST]
    special = {*_FIRST, *holders, *_LAST}
    added = [
        {
            "id": number, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for number, word in enumerate(words)
        if word in special
    ]  # fmt: skip
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_split_specs())},
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": {w: i for i, w in enumerate(words)},
            "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip
    return json.dumps(value, ensure_ascii=False, indent=0) + "\n"


def tokenizer_config(max_tokens: int) -> dict[str, object]:
    """What goes into `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }


def special_id(tokenizer: Tokenizer, spelling: str) -> int:
    """The id of a special token.

    Raises:
        ValueError: when the tokenizer has no such token.
    """
    number = tokenizer.token_to_id(spelling)
    if number is None:
        raise ValueError(f"the tokenizer has no token {spelling}")
    return int(number)


def successors(tokenizer: Tokenizer) -> Counter[tuple[int, int]]:
    """How often which id follows which, when the sentences are the answers in chats."""
    start, end, stop = (special_id(tokenizer, t) for t in (THINK, THINK_END, EOS))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    thought = [start, *ids(THOUGHT), end]
    pairs = Counter(pairwise(thought))
    inside = [ids(" " + text) for text in TEXT]
    for text, sentence, then in zip(TEXT, inside, inside[1:] + inside[:1], strict=True):
        opening = ids(text)
        pairs.update(pairwise([*sentence, then[0]]))
        # The opening word has its own spelling, but goes on as it does inside a paragraph.
        pairs.update(pairwise([end, *opening[: len(opening) - len(sentence) + 2]]))
    pairs[inside[0][-1], stop] = 2  # all end in the same full stop, the only place to end an answer
    return pairs


def _pieces(text: str) -> list[str]:
    splitter = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


def _split_specs() -> Iterator[dict[str, object]]:
    for pattern in _SPLITS:
        yield {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    yield {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)
