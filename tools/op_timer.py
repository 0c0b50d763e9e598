"""Times one operation's kernel on a GPU, with nothing but its own buffers.

A CUDA graph holds many launches one behind the other, so that a time is what a step pays: the
kernel and the hand-over to the next one. Weights and state rotate over copies that together exceed
the L2 cache by far, as between two steps; activations stay in it, where their producer left them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ultraflash.graphs.plan import Geometry, Life, Op, Ref
from ultraflash.runtime.gpu import args
from ultraflash.runtime.gpu.driver import (
    Address,
    Device,
    Event,
    Function,
    Graph,
    Stream,
    allocate,
    copy,
    memory,
    release,
    upload,
)
from ultraflash.runtime.gpu.nvrtc import Kernel, Unit, compile_unit
from ultraflash.runtime.weights.layout import stored_sizes
from ultraflash.tools.op_data import Array, Setting, contents

_GRAPH_MS = 10.0  # of work in one graph, about: long enough for the clock, short enough to wait for
_MAX_LAUNCHES = 512
_REPLAYS = 7
_L2_TIMES = 3  # what rotating copies hold together


@dataclass(frozen=True)
class StreamRead(Op):
    """Reads `x` [n] f32 once with `ctas` CTAs; `y` [1] f32 is hardly ever written."""

    x: Ref
    y: Ref
    ctas: int

    @classmethod
    def stem(cls) -> str:
        """A probe: no operation of a plan."""
        return "probes/stream_read"

    def geometry(self) -> Geometry:
        """As many CTAs as are asked for."""
        return Geometry(self.ctas, threads=512)


@dataclass(frozen=True)
class Timing:
    """Microseconds of a launch: median over replays, and the fastest."""

    us: float
    best_us: float
    launches: int
    copies: int
    kernel: Kernel


class OpTimer:
    """Takes operations one after the other; each gives its memory back."""

    READ: ClassVar[tuple[int, ...]] = (2, 4)  # CTAs an SM that the read probe is tried with

    def __init__(self, device: Device, cache: Path, seed: int = 0) -> None:
        """Nothing is compiled yet."""
        self._device, self._cache = device, cache
        self._rng = np.random.default_rng(seed)
        self._stream = Stream()
        self._functions: dict[Unit, tuple[Function, Kernel]] = {}

    def read_gb_per_s(self, size: int = 4 << 30) -> float:
        """How fast memory is read by a kernel that does nothing else."""
        size = min(size, memory()[0] // 4) // 16 * 16
        best = min(self._stream_read(size, self._device.num_sms * n).us for n in self.READ)
        return size / best / 1e3

    def floor_us(self) -> float:
        """A launch of a kernel that has nothing to do."""
        return self._stream_read(16, 1).us

    def time(self, op: Op, setting: Setting) -> Timing:
        """Time one operation with contents as op_data makes them.

        Raises:
            CompileError: when its kernel does not compile.
            DeviceError: when its buffers do not fit into the GPU's memory.
        """
        buffers = _Buffers(op, setting, self._device.l2_bytes * _L2_TIMES, self._rng)
        try:
            return self._time(op, buffers)
        finally:
            buffers.release()

    def _stream_read(self, size: int, ctas: int) -> Timing:
        x = Ref("x", (size // 4,), "f32", Life.IO)
        op = StreamRead(x, Ref("y", (1,), "f32", Life.IO), ctas)
        return self.time(op, Setting(context=1))

    def _time(self, op: Op, buffers: _Buffers) -> Timing:
        function, kernel = self._function(op)
        launch = op.launch(self._device.arch)
        function.allow_shared(launch.shared)
        packed = [args.pack(op, placed.__getitem__) for placed in buffers.placed]
        once = self._captured(function, op, packed[:1])
        once_ms = min(self._replays(once, 3))
        wanted = int(min(max(_GRAPH_MS / once_ms, 8), _MAX_LAUNCHES))
        rounds = -(-wanted // len(packed))
        count = rounds * len(packed)
        graph = self._captured(function, op, packed * rounds)
        times = [1e3 * ms / count for ms in self._replays(graph, _REPLAYS)]
        once.close()
        graph.close()
        return Timing(statistics.median(times), min(times), count, buffers.copies, kernel)

    def _captured(self, function: Function, op: Op, packed: Sequence[bytes]) -> Graph:
        launch = op.launch(self._device.arch)
        graph = Graph(self._stream)
        for each in packed:
            self._stream.launch(function, launch.grid, launch.block, launch.shared, each)
        graph.finish()
        return graph

    def _replays(self, graph: Graph, count: int) -> list[float]:
        """Milliseconds of each of `count` replays behind one that warms up."""
        times = []
        for _ in range(count + 1):
            before, after = Event(), Event()
            before.record(self._stream)
            graph.launch()
            after.record(self._stream)
            self._stream.wait()
            times.append(after.since(before))
        return times[1:]

    def _function(self, op: Op) -> tuple[Function, Kernel]:
        unit = Unit.of(op)
        if unit not in self._functions:
            kernel = compile_unit(unit, self._device.arch, self._cache)
            self._functions[unit] = Function(kernel.cubin, unit.entry), kernel
        return self._functions[unit]


class _Buffers:
    """An operation's buffers in as many copies as are needed; `placed` has addresses for each."""

    CHOICES: ClassVar[int] = 16  # sets of integers, which choose what is read of large weights
    MOST: ClassVar[int] = 64

    def __init__(
        self, op: Op, setting: Setting, rotate_bytes: int, rng: np.random.Generator
    ) -> None:
        """Allocate and fill.

        Raises:
            DeviceError: when memory does not suffice.
        """
        self._held: list[Address] = []
        self._known: dict[str, Array] = {}
        self._op, self._setting, self._rng = op, setting, rng
        refs = list(op.refs)
        rotating = [(name, ref) for name, ref in refs if ref.life in (Life.WEIGHT, Life.STATE)]
        size = sum(ref.nbytes for _, ref in rotating)
        self.copies = 1
        if size:
            fitting = max(1, memory()[0] // 2 // size)
            self.copies = max(1, min(-(-rotate_bytes // size), fitting, self.MOST))
        choosing = [
            (name, ref)
            for name, ref in refs
            if ref.dtype in ("i32", "i64") and (name, ref) not in rotating
        ]
        fixed = [item for item in refs if item not in rotating and item not in choosing]
        try:
            (shared,) = self._place(fixed, 1)
            copies = self._place(rotating, self.copies)
            choices = [self._place(choosing, 1)[0] for _ in range(max(self.copies, self.CHOICES))]
        except BaseException:
            self.release()
            raise
        count = len(choices) if choosing else self.copies
        self.placed = [
            shared | copies[i % self.copies] | choices[i % len(choices)] for i in range(count)
        ]

    def release(self) -> None:
        """Give all memory back."""
        while self._held:
            release(self._held.pop())

    def _place(
        self, items: Sequence[tuple[str, Ref]], copies: int
    ) -> list[dict[Ref, tuple[Address, ...]]]:
        """Addresses of buffers, `copies` times; equal contents serve for all copies."""
        placed: list[dict[Ref, tuple[Address, ...]]] = [{} for _ in range(copies)]
        for name, ref in items:
            sizes = stored_sizes(ref)
            filled = name not in self._op.OUT
            made: tuple[Array, ...] = ()
            if filled:
                made = contents(self._op, name, ref, self._setting, self._rng, self._known)
                self._known[name] = made[0]
            for each in placed:
                each[ref] = tuple(self._allocate(size, ref) for size in sizes)
                for address, size, values in zip(each[ref], sizes, made, strict=False):
                    _fill(address, size, values)
        return placed

    def _allocate(self, size: int, ref: Ref) -> Address:
        self._held.append(allocate(size, f"buffer {ref}"))
        return self._held[-1]


def _fill(address: Address, size: int, values: Array) -> None:
    """Put a beginning at an address and repeat it, each time twice as much, up to `size`."""
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)[:size]
    upload(address, raw)
    done = raw.nbytes
    while done < size:
        more = min(done, size - done)
        copy(address + done, address, more)
        done += more
