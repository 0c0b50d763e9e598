"""The bytes that each token id stands for, read from `tokenizer.json`.

The model authors' parser drops a character whose bytes are incomplete when the answer ends; with
this table we can tell, and put a replacement character there.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import msgspec


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Bpe(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _Bpe
    added_tokens: list[_AddedToken] = []


class Vocabulary:
    """Token id -> bytes."""

    def __init__(self, table: dict[int, bytes]) -> None:
        """`table` need not be complete: other ids stand for nothing."""
        self._table = table

    @classmethod
    def from_file(cls, tokenizer_json: Path) -> Vocabulary:
        """Read a byte-level BPE.

        Raises:
            OSError: when the file cannot be read.
            msgspec.DecodeError: when it is not such a tokenizer.
        """
        file = msgspec.json.decode(tokenizer_json.read_bytes(), type=_TokenizerFile)
        table = {number: _bytes_of(text) for text, number in file.model.vocab.items()}
        table |= {token.id: token.content.encode() for token in file.added_tokens}
        return cls(table)

    def of(self, ids: Sequence[int]) -> bytes:
        """The bytes of `ids`, one after the other."""
        return b"".join([self._table.get(i, b"") for i in ids])


class Tail:
    """Follows an answer and knows whether it ends within a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Nothing said yet."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> None:
        """The answer goes on with `ids`."""
        self._decoder.decode(self._vocabulary.of(ids))

    def finish(self) -> str:
        """What stands for the bytes left over: nothing, or a replacement character."""
        return self._decoder.decode(b"", True)


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def _bytes_of(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[c] for c in text])
    except KeyError:
        return text.encode()  # a special token, spelled as itself
