"""Fills device memory with random contents, made on the device from a key alone.

Nothing else knows these kernels: they are no operations of a plan. `runtime/weights/synthetic.py`
says which contents a buffer gets and has the NumPy form of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultraflash.graphs.plan import Geometry, Life, Op, Ref
from ultraflash.runtime.gpu import args
from ultraflash.runtime.gpu.driver import Address, Device, Function, Stream, allocate, upload
from ultraflash.runtime.gpu.nvrtc import Unit, compile_unit
from ultraflash.runtime.weights.synthetic import Codes, Content

_CTAS_PER_SM = 8
_EXTENT = 1 << 20  # of a buffer that is too long for one 32-bit extent


@dataclass(frozen=True)
class FillCodes(Op):
    """y_i = table[random byte i]. y: [m, n] u8; table: [256] u8."""

    y: Ref
    table: Ref
    key_low: int
    key_high: int
    ctas: int

    @classmethod
    def stem(cls) -> str:
        """A probe: no operation of a plan."""
        return "probes/fill_codes"

    def geometry(self) -> Geometry:
        """As many CTAs as are asked for."""
        return Geometry(self.ctas)


@dataclass(frozen=True)
class FillNormal(Op):
    """y = mean + deviation * n. y: [m, n] bf16 | f32."""

    y: Ref
    mean: float
    deviation: float
    key_low: int
    key_high: int
    ctas: int

    @classmethod
    def stem(cls) -> str:
        """A probe: no operation of a plan."""
        return "probes/fill_normal"

    def geometry(self) -> Geometry:
        """As many CTAs as are asked for."""
        return Geometry(self.ctas)


class Filler:
    """Queues fills on a stream of its own; `wait` until they are done."""

    def __init__(self, device: Device, cache_dir: Path) -> None:
        """Nothing is compiled yet."""
        self._device, self._cache_dir = device, cache_dir
        self._ctas = device.num_sms * _CTAS_PER_SM
        self._stream, self._functions = Stream(), dict[Unit, Function]()
        self._tables: dict[bytes, Address] = {}

    def fill(self, address: Address, count: int, dtype: str, content: Content) -> None:
        """Fill `count` elements of type u8, bf16 or f32 at `address`.

        Raises:
            CompileError: when the kernel does not compile.
            DeviceError: when the device refuses it.
        """
        y = Ref("y", _shape(count), dtype, Life.SCRATCH)
        low, high = content.key & 0x7FFFFFFF, content.key >> 31 & 0x7FFFFFFF
        op: Op
        if isinstance(content, Codes):
            table = Ref("table", (256,), "u8", Life.SCRATCH)
            op, places = FillCodes(y, table, low, high, self._ctas), {y: address}
            places[table] = self._table(content.table)
        else:
            op = FillNormal(y, content.mean, content.deviation, low, high, self._ctas)
            places = {y: address}
        self._launch(op, lambda ref: (places[ref],))

    def wait(self) -> None:
        """Everything queued is filled."""
        self._stream.wait()

    def _launch(self, op: Op, address: Callable[[Ref], tuple[int, ...]]) -> None:
        unit = Unit.of(op)
        if unit not in self._functions:
            kernel = compile_unit(unit, self._device.arch, self._cache_dir)
            self._functions[unit] = Function(kernel.cubin, unit.entry)
        launch = op.launch(self._device.arch)
        packed = args.pack(op, address)
        self._stream.launch(self._functions[unit], launch.grid, launch.block, 0, packed)

    def _table(self, table: bytes) -> Address:
        if table not in self._tables:
            self._tables[table] = allocate(len(table), "a table of random codes")
            upload(self._tables[table], np.frombuffer(table, np.uint8))
        return self._tables[table]


def _shape(count: int) -> tuple[int, int]:
    """Two extents of 32 bits."""
    if count < 1 << 31:
        return 1, count
    assert count % _EXTENT == 0, f"{count} elements are too many for one extent, and not whole MiB"
    return count // _EXTENT, _EXTENT
