from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultraflash.server import messages
from ultraflash.server.messages import (
    Abort,
    FrameError,
    Frames,
    FromEngine,
    Opened,
    Opening,
    Refused,
    StepOf,
    Steps,
    Submit,
    ToEngine,
    frame,
    pack_ids,
    unpack_ids,
)

SENT: list[ToEngine | FromEngine] = [
    Submit("k", pack_ids([0, 5, 2**32 - 1]), 7, 0.5, 0.9, 3, None, 1, True),
    Abort("k"),
    Opening(1, 2),
    Opened("f", 8),
    Steps(3, [StepOf("k", [1, 2], None, 4, 0, 1.5, 2.5), StepOf("l", [], "stop", 1, 1, 0.0, 0.0)]),
    Steps(4, []),
    Refused("k", "ids", "too long"),
]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_messages_survive_any_cutting_of_the_stream(sizes: list[int]) -> None:
    data = b"".join(map(frame, SENT))
    frames, bodies = Frames(), []
    cuts = itertools.cycle(sizes)
    while data:
        size = next(cuts)
        bodies += frames.feed(data[:size])
        data = data[size:]
    kinds = ToEngine | FromEngine
    assert [msgspec.msgpack.decode(body, type=kinds) for body in bodies] == SENT


def test_ids_come_back() -> None:
    assert unpack_ids(pack_ids([0, 1, 2**32 - 1])) == (0, 1, 2**32 - 1)
    assert pack_ids([1]) == b"\x01\0\0\0"


def test_an_absurd_length_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError, match="frame of 101 bytes; at most 100"):
        Frames().feed(b"\x65\0\0\0")
