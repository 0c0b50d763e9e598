"""What the HTTP side and the engine process say to each other: msgpack in length-prefixed frames.

A frame is a little-endian u32 length and one tagged message. Prompt ids travel as packed
little-endian u32, so that a million of them cost one copy. This file knows bytes; sockets belong to
`link.py` and `worker.py`.
"""

from __future__ import annotations

import array
import struct
import sys
from collections.abc import Sequence

import msgspec

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """To the engine: run this request; `ids` as `pack_ids` gives them."""

    key: str
    ids: bytes
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    min_tokens: int
    ignore_eos: bool


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """To the engine: nobody wants this request's tokens any more; unknown keys are fine."""

    key: str


class Opening(msgspec.Struct, tag="opening", array_like=True, frozen=True):
    """From the engine: not ready yet; bytes of weights done and in all (0: not known)."""

    done_bytes: int
    total_bytes: int


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """From the engine: it has run a real step and takes requests."""

    fingerprint: str
    max_seq: int


class StepOf(msgspec.Struct, array_like=True, frozen=True):
    """What one engine step gave one request; `finish` is stop, length, or None while it goes on."""

    key: str
    tokens: list[int]
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    prefill_ms: float
    decode_ms: float
    rows: int = 0


class Steps(msgspec.Struct, tag="steps", array_like=True, frozen=True):
    """From the engine: one message a step, for all requests that it moved."""

    number: int
    items: list[StepOf]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """From the engine: this request can never run; `field` names the part at fault."""

    key: str
    field: str
    message: str


ToEngine = Submit | Abort
FromEngine = Opening | Opened | Steps | Refused

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of one message on the wire."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameError(Exception):
    """The other side sent what is not a frame of this protocol."""


class Frames:
    """Cuts a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        """Nothing received yet."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that `data` completes.

        Raises:
            FrameError: for a length beyond `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        bodies, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array.array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The token ids that `pack_ids` packed."""
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)
