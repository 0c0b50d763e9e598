"""Weights to the device through few pinned buffers, each filled by a thread of its own.

One thread copies slower from the page cache than the bus takes it, so that several fill buffers
while others travel. What has a layout lands in a device buffer beside the pinned one, from where a
kernel puts it into its place: on the stream of that pair, so that copies and kernels overlap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.plan import Op, Ref
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu import args
from ultraflash.runtime.gpu.driver import (
    Address,
    Device,
    Function,
    Pinned,
    Stream,
    allocate,
    release,
)
from ultraflash.runtime.gpu.nvrtc import Unit, compile_unit
from ultraflash.runtime.weights.layout import Relayout

BUFFERS, BUFFER_BYTES = min(8, os.cpu_count() or 1), 16 << 20

Array = npt.NDArray[Any]
Check = Callable[[int, int, Array], None]


class _Piece(NamedTuple):
    """Rows of an array that is placed: which array, its first row, the rows."""

    part: int
    first: int
    rows: Array


class _Lane:
    """A pinned buffer, the device buffer that it lands in, their stream, and who uses them."""

    def __init__(self, size: int) -> None:
        self.pinned, self.stream = Pinned(size), Stream()
        self.landing = allocate(size, "a buffer for weights under way")
        self.last: Future[None] | None = None

    def wait(self) -> None:
        """Until its last load has arrived.

        Raises:
            EngineError: when that failed.
        """
        if self.last is not None:
            self.last.result()

    def fill(self, load: list[_Piece], check: Check | None) -> int:
        """Copy rows one behind the other into the pinned buffer; how many bytes they are."""
        at = 0
        for part, first, rows in load:
            here = self.pinned.view(at, rows.shape, rows.dtype)
            np.copyto(here, rows)
            if check:
                check(part, first, here)
            at += here.nbytes
        return at

    def close(self) -> None:
        """Give the buffers back; nothing may be under way."""
        self.stream.wait()
        self.pinned.close()
        release(self.landing)


class Uploader:
    """Places host arrays on the device; leave the `with` block and everything has arrived."""

    def __init__(
        self, device: Device, cache_dir: Path, buffers: int = BUFFERS, size: int = BUFFER_BYTES
    ) -> None:
        """Pin the buffers and start a thread for each."""
        self._arch, self._cache_dir = device.arch, cache_dir
        self._lanes = [_Lane(size) for _ in range(buffers)]
        self._size, self._turn = size, 0
        self._functions: dict[Unit, Function] = {}
        self._pool = ThreadPoolExecutor(buffers, "weights", initializer=device.enter)

    def __enter__(self) -> Uploader:
        """Nothing to do: the buffers are there."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is under way and give the buffers back; fails as what was under way did."""
        try:
            if error is None:
                self.wait()
        finally:
            self._pool.shutdown()
            for lane in self._lanes:
                lane.close()

    def wait(self) -> None:
        """Until everything placed so far has arrived.

        Raises:
            EngineError: when some of it did not.
        """
        for lane in self._lanes:
            lane.wait()

    def place(
        self,
        name: str,
        parts: Sequence[Array],
        layout: type[Relayout] | None = None,
        check: Check | None = None,
    ) -> Address:
        """Send arrays of one shape, one behind the other, each put into `layout`.

        `check` sees all rows before they leave, in any order and thread: which part, its first row,
        the rows. The copies may still be under way afterwards; what fails then is raised later.

        Raises:
            CompileError: when the layout's kernel does not compile.
            DeviceError: when the device has no room for it, or a buffer none for the rows that a
                layout keeps together.
        """
        parts = [np.atleast_1d(part) for part in parts]
        if layout is None:
            address = allocate(sum(part.nbytes for part in parts), f"weight {name}")
            self._copy(name, parts, address, check)
            return address
        rows, columns = _logical(parts[0], layout)
        size = layout.of(rows, columns).y.nbytes
        address = allocate(len(parts) * size, f"weight {name}")
        if rows % layout.ROWS == 0:  # as one matrix, so that small ones share a buffer
            self._lay_out(name, parts, layout, address, check)
        else:
            for number, part in enumerate(parts):
                one = None if check is None else _of_part(check, number)
                self._lay_out(name, [part], layout, address + number * size, one)
        return address

    def _copy(self, name: str, parts: list[Array], address: Address, check: Check | None) -> None:
        def send(lane: _Lane, load: list[_Piece], to: Address) -> None:
            size = lane.fill(load, check)
            lane.stream.copy_in(to, lane.pinned.address, size)
            lane.stream.wait()

        for load in _loads(parts, self._rows_of_a_load(name, parts[0], 1)):
            self._submit(send, load, address)
            address += sum(piece.rows.nbytes for piece in load)

    def _lay_out(
        self,
        name: str,
        parts: list[Array],
        layout: type[Relayout],
        address: Address,
        check: Check | None,
    ) -> None:
        _, columns = _logical(parts[0], layout)

        def send(lane: _Lane, load: list[_Piece], to: Address) -> None:
            size = lane.fill(load, check)
            lane.stream.copy_in(lane.landing, lane.pinned.address, size)
            op = layout.of(_height(load), columns)
            self._launch(lane, op, {op.x: (lane.landing,), op.y: (to,)})
            lane.stream.wait()

        for load in _loads(parts, self._rows_of_a_load(name, parts[0], layout.ROWS)):
            op = layout.of(_height(load), columns)
            self._load(Unit.of(op))
            self._submit(send, load, address)
            address += op.y.nbytes

    def _rows_of_a_load(self, name: str, part: Array, together: int) -> int:
        row_bytes = max(1, part[:1].nbytes)
        if most := self._size // row_bytes // together * together:
            return int(most)
        raise DeviceError(
            f"weight {name} has rows of {row_bytes} bytes, {together} of which stay "
            f"together, and a buffer has {self._size}: give the uploader larger buffers"
        )

    def _submit(
        self,
        send: Callable[[_Lane, list[_Piece], Address], None],
        load: list[_Piece],
        address: Address,
    ) -> None:
        self._turn += 1
        lane = self._lanes[self._turn % len(self._lanes)]
        lane.wait()
        lane.last = self._pool.submit(send, lane, load, address)

    def _load(self, unit: Unit) -> None:
        if unit not in self._functions:
            kernel = compile_unit(unit, self._arch, self._cache_dir)
            self._functions[unit] = Function(kernel.cubin, unit.entry)

    def _launch(self, lane: _Lane, op: Op, addresses: dict[Ref, tuple[Address, ...]]) -> None:
        launch, function = op.launch(self._arch), self._functions[Unit.of(op)]
        packed = args.pack(op, addresses.__getitem__)
        lane.stream.launch(function, launch.grid, launch.block, launch.shared, packed)


def _loads(parts: Sequence[Array], most: int) -> Iterator[list[_Piece]]:
    """The rows of all parts in order, at most so many together."""
    load: list[_Piece] = []
    room = most
    for number, part in enumerate(parts):
        first = 0
        while first < len(part):
            rows = part[first : first + room]
            load.append(_Piece(number, first, rows))
            first, room = first + len(rows), room - len(rows)
            if not room:
                yield load
                load, room = [], most
    if load:
        yield load


def _of_part(check: Check, number: int) -> Check:
    return lambda _, first, rows: check(number, first, rows)


def _height(load: list[_Piece]) -> int:
    return sum(len(piece.rows) for piece in load)


def _logical(array: Array, layout: type[Relayout]) -> tuple[int, int]:
    """Rows and columns of a stored matrix: a byte may hold several elements of a row."""
    rows, columns = array.shape
    return rows, columns * layout.PACKED
