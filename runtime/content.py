"""What the beginning of a prompt is called: content ids, keys of prefixes, where a prompt resumes.

Two prompts share state exactly as far as their content ids agree. A text token's content id is its
id; every position of an image has one of its own, because all image positions carry the same token
id and two pictures would look alike. Pure functions of ids and digests: no tensors, no store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ultraflash.runtime.request import ImageSpan

U64 = npt.NDArray[np.uint64]

VERSION = 1  # of content ids and keys; part of the fingerprint
_IMAGE = np.uint64(1 << 63)  # token ids stay below
_CONTEXT = f"ultraflash prefix key {VERSION}"


@dataclass(frozen=True, slots=True)
class Marks:
    """The special ids at whose places conversations are cut."""

    eos: int  # ends a turn
    assistant: int  # opens the model's turn
    user: int  # opens a user's turn


def image_digest(data: bytes, preprocessing: int) -> bytes:
    """What an image is: its bytes and the version of the code that turns them into rows."""
    return blake3(struct.pack("<I", preprocessing) + data).digest()


def content_ids(ids: Sequence[int], images: Iterable[ImageSpan] = ()) -> U64:
    """Content ids of token ids. [P] u64, little-endian.

    Position j of an image is the high bit and 63 bits of word j of the extended BLAKE3 of its
    digest.
    """
    content = np.array(ids, "<u8")
    for image in images:
        words = blake3(image.digest).digest(length=8 * image.length)
        content[image.start : image.start + image.length] = np.frombuffer(words, "<u8") | _IMAGE
    return content


class PrefixKeys:
    """Keys of one conversation's prefixes; every id is hashed once.

    A key is BLAKE3(fingerprint, salt, content ids of the prefix). Who may not know what others
    asked gets a salt of his own.
    """

    def __init__(self, fingerprint: str, salt: str, content: U64) -> None:
        """`content` is what is known so far; `extend` adds to it."""
        self._content = content
        self._hash = blake3(derive_key_context=_CONTEXT)
        for part in (fingerprint.encode(), salt.encode()):
            self._hash.update(struct.pack("<Q", len(part)) + part)
        self._hashed = 0
        self._known: dict[int, bytes] = {}

    @property
    def length(self) -> int:
        """Content ids known so far."""
        return len(self._content)

    def extend(self, content: U64) -> None:
        """The conversation goes on."""
        self._content = np.concatenate([self._content, content])

    def at(self, end: int) -> bytes:
        """The key of the first `end` content ids: at most `length`, and asked for before or not
        below any other that was.
        """
        if end not in self._known:
            assert self._hashed <= end <= self.length, f"{end} after {self._hashed}"
            self._hash.update(self._content[self._hashed : end].tobytes())
            self._hashed = end
            self._known[end] = self._hash.digest()
        return self._known[end]


def resume_ends(content: U64, marks: Marks, every: int) -> list[int]:
    """Lengths at which state of this prompt may be found, longest first.

    Before every end of turn, before every opening of the model's turn, at the end of the system
    prompt, and at multiples of `every`; at most P - 1, for the last token has to run.
    """
    turns = np.flatnonzero((content == marks.eos) | (content == marks.assistant))
    ends = {*turns.tolist(), *range(every, len(content), every), system_end(content, marks)}
    return sorted(ends - {0}, reverse=True)


def answer_start(content: U64, marks: Marks) -> int:
    """The length before the last opening of the model's turn; 0 without one.

    What follows it is not in the next prompt if thinking is dropped or switched.
    """
    return int(np.flatnonzero(content == marks.assistant)[-1:].sum())


def system_end(content: U64, marks: Marks) -> int:
    """The length before the first user's turn; 0 without one."""
    return int(np.flatnonzero(content == marks.user)[:1].sum())
