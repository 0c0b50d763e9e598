"""What the driver's calls have done when they return, as a stream of our own sees it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from helpers.device import REHEARSAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REHEARSAL, reason="this is about streams"),
]
SIZE = 1 << 30  # takes a moment: bytes that are still on their way would be missed
TAIL = 256


@pytest.fixture
def twice() -> Iterator[int]:
    """Two stretches of `SIZE` bytes, one behind the other."""
    from ultraflash.runtime.gpu.driver import Device, allocate, release

    Device.open()
    address = allocate(2 * SIZE, "a test")
    yield address
    release(address)


def seen(address: int) -> set[int]:
    """Values of the last bytes before an address, read at once by a stream that waits for none."""
    from ultraflash.runtime.gpu.driver import Pinned, Stream

    stream, pinned = Stream(), Pinned(TAIL)
    stream.copy_out(pinned.address, address - TAIL, TAIL)
    stream.wait()
    found = set(pinned.bytes.tolist())
    pinned.close()
    return found


def test_uploads_clears_and_copies_are_done_when_they_return(twice: int) -> None:
    from ultraflash.runtime.gpu.driver import clear, copy, upload

    ones = np.full(SIZE // 4, 1, np.uint8)
    for _ in range(3):
        upload(twice + SIZE - len(ones), ones)
        assert seen(twice + SIZE) == {1}
        copy(twice + SIZE, twice, SIZE)
        assert seen(twice + 2 * SIZE) == {1}
        clear(twice, 2 * SIZE)
        assert seen(twice + 2 * SIZE) == {0}
