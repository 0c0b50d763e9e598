"""Weights to the device through few pinned buffers: the host fills one while the others travel.

What has a layout lands in a device buffer beside the pinned one, from where a kernel puts it into
its place: on the stream of that pair, so that copies and kernels of different pairs overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.plan import Op, Ref
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu import args
from ultraflash.runtime.gpu.driver import Address, Function, Pinned, Stream, allocate, release
from ultraflash.runtime.gpu.nvrtc import Unit, compile_unit
from ultraflash.runtime.weights.layout import Relayout

BUFFERS, BUFFER_BYTES = 3, 32 << 20


class _Lane:
    """A pinned buffer, the device buffer that it lands in, and their stream."""

    def __init__(self, size: int) -> None:
        self.pinned, self.stream = Pinned(size), Stream()
        self.landing = allocate(size, "a buffer for weights under way")

    def fill(self, piece: npt.NDArray[np.uint8]) -> None:
        """Take a piece, once the last one has left."""
        self.stream.wait()
        self.pinned.bytes[: len(piece)] = piece

    def close(self) -> None:
        """Wait for what is under way and give the buffers back."""
        self.stream.wait()
        self.pinned.close()
        release(self.landing)


class Uploader:
    """Places host arrays on the device; leave the `with` block and everything has arrived."""

    def __init__(
        self, arch: str, cache_dir: Path, buffers: int = BUFFERS, size: int = BUFFER_BYTES
    ) -> None:
        """Pin the buffers; each has a stream of its own, to be waited for alone."""
        self._arch, self._cache_dir = arch, cache_dir
        self._lanes = [_Lane(size) for _ in range(buffers)]
        self._size, self._turn = size, 0
        self._functions: dict[Unit, Function] = {}

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
        for lane in self._lanes:
            lane.close()

    def wait(self) -> None:
        """Until everything placed so far has arrived."""
        for lane in self._lanes:
            lane.stream.wait()

    def place(
        self, name: str, parts: Sequence[npt.NDArray[Any]], layout: type[Relayout] | None = None
    ) -> Address:
        """Send arrays of one shape, one behind the other, each put into `layout`.

        The copies may still be under way afterwards.

        Raises:
            CompileError: when the layout's kernel does not compile.
            DeviceError: when the device has no room for it, or a buffer none for the rows that a
                layout keeps together.
        """
        size = layout.of(*_logical(parts[0], layout)).y.nbytes if layout else parts[0].nbytes
        address = allocate(len(parts) * size, f"weight {name}")
        for number, part in enumerate(parts):
            at = address + number * size
            if layout:
                self._lay_out(name, part, layout, at)
            else:
                self._copy(part, at)
        return address

    def _copy(self, array: npt.NDArray[Any], address: Address) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), self._size):
            piece = data[start : start + self._size]
            lane = self._next()
            lane.fill(piece)
            lane.stream.copy_in(address + start, lane.pinned.address, len(piece))

    def _lay_out(
        self, name: str, array: npt.NDArray[Any], layout: type[Relayout], address: Address
    ) -> None:
        rows, columns = _logical(array, layout)
        most = self._size // array[:1].nbytes // layout.ROWS * layout.ROWS
        if not most:
            raise DeviceError(
                f"weight {name} has rows of {array[:1].nbytes} bytes, {layout.ROWS} of which stay "
                f"together, and a buffer has {self._size}: give the uploader larger buffers"
            )
        for first in range(0, rows, most):
            piece = np.ascontiguousarray(array[first : first + most])
            lane = self._next()
            lane.fill(piece.reshape(-1).view(np.uint8))
            lane.stream.copy_in(lane.landing, lane.pinned.address, piece.nbytes)
            op = layout.of(len(piece), columns)
            self._launch(lane, op, {op.x: (lane.landing,), op.y: (address,)})
            address += op.y.nbytes

    def _launch(self, lane: _Lane, op: Op, addresses: dict[Ref, tuple[Address, ...]]) -> None:
        unit = Unit.of(op)
        if unit not in self._functions:
            kernel = compile_unit(unit, self._arch, self._cache_dir)
            self._functions[unit] = Function(kernel.cubin, unit.entry)
        launch = op.launch(self._arch)
        packed = args.pack(op, addresses.__getitem__)
        lane.stream.launch(self._functions[unit], launch.grid, launch.block, launch.shared, packed)

    def _next(self) -> _Lane:
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)]


def _logical(array: npt.NDArray[Any], layout: type[Relayout]) -> tuple[int, int]:
    """Rows and columns of a stored matrix: a byte may hold several elements of a row."""
    rows, columns = array.shape
    return rows, columns * layout.PACKED
