"""Weights to the device through few pinned buffers: the host fills one while the others travel."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.runtime.gpu.driver import Address, Pinned, Stream, allocate

BUFFERS, BUFFER_BYTES = 3, 32 << 20


class Uploader:
    """Places host arrays on the device; leave the `with` block and everything has arrived."""

    def __init__(self, buffers: int = BUFFERS, size: int = BUFFER_BYTES) -> None:
        """Pin the buffers; each has a stream of its own, to be waited for alone."""
        self._lanes = [(Pinned(size), Stream()) for _ in range(buffers)]
        self._size, self._turn = size, 0

    def __enter__(self) -> Uploader:
        """Nothing to do: the buffers are there."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is under way and give the buffers back."""
        for pinned, stream in self._lanes:
            stream.wait()
            pinned.close()

    def place(self, name: str, array: npt.NDArray[Any]) -> Address:
        """Allocate room for an array and send it; the copy may still be under way afterwards.

        Raises:
            DeviceError: when the device has no room for it.
        """
        address = allocate(array.nbytes, f"weight {name}")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), self._size):
            piece = data[start : start + self._size]
            pinned, stream = self._lanes[self._turn % len(self._lanes)]
            self._turn += 1
            stream.wait()  # the buffer's last piece has left
            pinned.bytes[: len(piece)] = piece
            stream.copy_in(address + start, pinned.address, len(piece))
        return address
