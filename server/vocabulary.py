"""The bytes that each token id stands for, read from `tokenizer.json`.

The model authors' parser holds back what it is given from the first incomplete character on,
and drops it when the answer ends there. With this table we hold back ourselves, by whole
characters, and say at the end what is left, with replacement characters.
"""

from __future__ import annotations

import codecs
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
        self.longest = max(map(len, table.values()), default=1)  # bytes of the longest token

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

    def of(self, token: int) -> bytes:
        """The bytes of one id."""
        return self._table.get(token, b"")


class Tail:
    """Follows an answer and keeps what stands behind its last whole character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Nothing said yet."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def push(self, token: int) -> bool:
        """The answer goes on; whether it now ends with a whole character."""
        self._text += self._decoder.decode(self._vocabulary.of(token))
        pending, _ = self._decoder.getstate()
        if pending or self._text.endswith("\ufffd"):
            return False
        self._text = ""
        return True

    def rest(self) -> str:
        """The text behind the last whole character, now that nothing follows."""
        return self._text + self._decoder.decode(b"", True)


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
