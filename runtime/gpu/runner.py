"""One plan on the GPU: buffers placed, arguments packed, captured as a graph and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ultraflash.graphs.io import RARE, RESULTS
from ultraflash.graphs.numerics import bf16_bits, bf16_from_bits
from ultraflash.graphs.plan import Geometry, Life, Node, Op, Plan, Ref
from ultraflash.runtime.backend import Array
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu import args
from ultraflash.runtime.gpu.arena import Arena
from ultraflash.runtime.gpu.driver import (
    Address,
    Event,
    Function,
    Graph,
    Pinned,
    allocate,
    download,
    release,
    upload,
)
from ultraflash.runtime.gpu.exchange import pieces

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend

STORED: dict[str, type[np.generic]] = {
    "bf16": np.uint16,
    "f32": np.float32,
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "u8": np.uint8,
}
_IO_ALIGNMENT = 64
_TIMES_BYTES = 16


@dataclass(frozen=True)
class CopyWords(Op):
    """y = x, one of them in pinned host memory; when, in nanoseconds of the device's clock.

    Shapes:
        x, y: [n] u64, n even; times: [2] u64, beginning and end.
    """

    OUT: ClassVar[tuple[str, ...]] = ("y", "times")
    x: Ref
    y: Ref
    times: Ref

    @classmethod
    def stem(cls) -> str:
        """It stands in no plan: a step's io is the runner's affair."""
        return "host/copy_words"

    @classmethod
    def of(cls, size: int) -> CopyWords:
        """A copy of `size` bytes, a multiple of 16."""
        x, y = (Ref(name, (size // 8,), "u64", Life.IO) for name in "xy")
        return cls(x, y, Ref("times", (2,), "u64", Life.IO))

    def geometry(self) -> Geometry:
        """One CTA: a step's io is a few kilobytes."""
        return Geometry(1)


class CudaRunner:
    """One plan on the GPU: implements `Runner`.

    Io lies in pinned memory and on the device alike, in three stretches: what the host writes,
    which every step brings in; what is rarely written, which goes over when it is; and the record,
    which every step brings out. Of the first and the last pinned memory has two places, with a
    graph for each: a step may be queued while the one before it is under way.
    """

    places = 2

    def __init__(
        self, backend: CudaBackend, plan: Plan, functions: dict[Node, Function], copy: Function,
        shared: Pinned | None = None,
    ) -> None:  # fmt: skip
        """Place buffers, pack arguments; graphs are captured by `prepare` or at first use.

        `copy`: the kernel of `CopyWords`. `shared`: another rank's host side of the io buffers, in
        the place of one of its own.
        """
        self.plan, self._backend, self._copy = plan, backend, copy
        self.arena = Arena.of(plan, keep_all=backend.keep_scratch)
        self._base = allocate(self.arena.size, f"scratch of {plan.name}")
        self._scratch = {p.name: self._base + p.offset for p in self.arena.places}
        self._place_io(plan, shared)
        written = {ref.name for node in plan.nodes for ref in node.op.writes()}
        self._changed = (written & self._io.keys()) - set(RESULTS)  # by the step, not by the host
        arch = backend.device.arch
        self._launches = []
        turn = 0
        for node in plan.nodes:
            launch, function = node.op.launch(arch), functions[node]
            function.allow_shared(launch.shared)
            packed = args.pack(node.op, self._addresses, backend.exchange, turn)
            turn += pieces(node.op, plan.world) if node.op.COLLECTIVE else 0
            self._launches.append((node, function, launch, packed))
        self._graphs: dict[int, Graph] = {}  # by place
        self._done = [Event(timing=False, spins=True) for _ in range(self.places)]

    def run(self, span: slice | None = None) -> None:
        """Replay the whole plan, or launch the nodes of `span` one by one; returns when done."""
        if span is None:
            self.launch()
        else:
            self._step(span)
        self.wait()

    def prepare(self) -> None:
        """Capture the graph of every place, unless nodes are launched one by one."""
        for place in range(0 if self._backend.eager else self.places):
            self._graph(place)

    def launch(self, place: int = 0) -> None:
        """Queue the whole plan on the backend's stream; the first time captures it."""
        if self._backend.eager:
            self._step(slice(None), place)
            return
        self._graph(place).launch()
        self._done[place].record(self._backend.stream)

    def wait(self, place: int = 0) -> None:
        """Wait for the latest launch to `place`, without holding the interpreter lock."""
        self._backend.stream.wait(self._done[place])
        self._io |= self._of_place[place]
        self._place = place

    @property
    def times_ns(self) -> tuple[int, int]:
        """When the launch that was waited for last began and ended, by the device's clock."""
        first, last = self._times[self._place]
        return int(first[0]), int(last[1])

    @property
    def nodes(self) -> int:
        """Nodes of a captured graph, 0 before the first run."""
        return self._graphs[0].nodes if self._graphs else 0

    @property
    def io_bytes(self) -> int:
        """What a step copies to the device and back."""
        return self._host_bytes + self._record_bytes

    def close(self) -> None:
        """Give scratch, io and graph back; the runner is of no use afterwards."""
        for graph in self._graphs.values():
            graph.close()
        release(self._base)
        release(self._io_base)
        self.pinned.close()

    def read(self, name: str, rank: int = 0) -> Array:
        """A buffer's contents, in the host's form.

        Raises:
            DeviceError: when the plan has no such buffer.
        """
        if name in self._io and name not in self._changed:
            return self._io[name]
        ref = self.plan.buffers.get(name)
        if ref is None:
            raise DeviceError(f"plan {self.plan.name} has no buffer {name!r}")
        return self.download(ref)

    def write(self, name: str, value: Array, place: int | None = None) -> None:
        """Put `value` into an io or scratch buffer, where steps bring it in before launches to
        every place, or to one.

        Raises:
            DeviceError: when the plan has no such buffer, or the shape differs.
        """
        ref = self.plan.buffers.get(name)
        if ref is None or ref.life not in (Life.IO, Life.SCRATCH):
            raise DeviceError(f"plan {self.plan.name} has no io or scratch buffer {name!r}")
        if value.shape != ref.shape:
            raise DeviceError(f"buffer {ref} cannot take an array of shape {value.shape}")
        if name in RARE or name in RESULTS:  # steps bring in neither
            self._io[name][...] = value
            upload(self._io_at[name], self._io[name])
            return
        if name in self._io:
            for views in self._of_place if place is None else [self._of_place[place]]:
                views[name][...] = value
            return
        host = np.ascontiguousarray(value, np.float32) if ref.dtype == "bf16" else value
        upload(self._addresses(ref)[0], bf16_bits(host) if ref.dtype == "bf16" else host)

    def write_state(self, ref: Ref, value: Array) -> None:
        """Replace a whole state buffer; for comparisons with another backend."""
        host = bf16_bits(value) if ref.dtype == "bf16" else value
        upload(self._backend.state(ref), host.astype(STORED[ref.dtype]).reshape(ref.shape))

    def poison(self, ref: Ref) -> None:
        """Fill a scratch buffer with bytes that no operation writes, so that gaps show."""
        upload(self._addresses(ref)[0], np.full(ref.nbytes, 0xFF, np.uint8))

    def _place_io(self, plan: Plan, shared: Pinned | None) -> None:
        refs = plan.of_life(Life.IO)
        record = [ref for ref in refs if ref.name in RESULTS]
        rare = [ref for ref in refs if ref.name in RARE]
        host = [ref for ref in refs if ref not in record and ref not in rare]
        sizes = {r.name: -(-r.nbytes // _IO_ALIGNMENT) * _IO_ALIGNMENT for r in refs}
        self._host_bytes = sum(sizes[ref.name] for ref in host)
        self._record_at = sum(sizes[ref.name] for ref in rare + host)
        # A record ends with the times of the step's first copy; those of the last one follow them.
        self._record_bytes = sum(sizes[ref.name] for ref in record) + _TIMES_BYTES
        stride = self._record_bytes - _TIMES_BYTES + _IO_ALIGNMENT
        # Pinned memory begins with what is rarely written and goes on with the places, each as the
        # device has it: what the host writes, then the record.
        rare_bytes = sum(sizes[ref.name] for ref in rare)
        place_bytes = self._host_bytes + stride
        self.pinned = shared or Pinned(rare_bytes + self.places * place_bytes)
        self._io_base = allocate(rare_bytes + place_bytes, "io")
        self._place_at = [rare_bytes + n * place_bytes for n in range(self.places)]
        self._io: dict[str, Array] = {}
        self._io_at: dict[str, Address] = {}
        self._of_place: list[dict[str, Array]] = [{} for _ in range(self.places)]
        offset = 0
        for ref in rare + host + record:
            view = partial(self.pinned.view, shape=ref.shape, dtype=STORED[ref.dtype])
            self._io[ref.name], self._io_at[ref.name] = view(offset), self._io_base + offset
            for number, views in enumerate(() if ref in rare else self._of_place):
                views[ref.name] = view(offset + number * place_bytes)
            offset += sizes[ref.name]
        self._times = [
            self.pinned.view(offset + n * place_bytes, (2, 2), np.uint64)
            for n in range(self.places)
        ]
        self._place = 0  # whose record is read

    def _addresses(self, ref: Ref) -> tuple[Address, ...]:
        if ref.life is Life.WEIGHT:
            return self._backend.weight(ref)
        if ref.life is Life.STATE:
            return (self._backend.state(ref),)
        return (self._io_at[ref.name] if ref.life is Life.IO else self._scratch[ref.name],)

    def copy_in(self, place: int = 0) -> None:
        """Queue what the host wrote."""
        times = self._io_base + self._record_at + self._record_bytes - _TIMES_BYTES
        from_host, to = (
            self.pinned.address + self._place_at[place],
            self._io_base + self._place_at[0],
        )
        self._copy_words(from_host, to, self._host_bytes, times)

    def queue(self, number: int) -> None:
        """Queue a node."""
        _, function, launch, packed = self._launches[number]
        self._backend.stream.launch(function, launch.grid, launch.block, launch.shared, packed)

    def copy_out(self, place: int = 0) -> None:
        """Queue what the host reads."""
        to = self.pinned.address + self._place_at[place] + self._host_bytes
        size = self._record_bytes
        self._copy_words(self._io_base + self._record_at, to, size, to + size)

    def examine(self, number: int) -> None:
        """Wait, and refuse NaN in what a node wrote.

        Raises:
            DeviceError: naming the node and the buffer.
        """
        node = self.plan.nodes[number]
        self._backend.stream.wait()
        for ref in node.op.writes():
            if ref.dtype not in ("bf16", "f32") or ref.life is Life.STATE:
                continue
            if np.isnan(self.download(ref)).any():
                raise DeviceError(f"node {node.label} wrote NaN into {ref}")

    def download(self, ref: Ref) -> Array:
        """What the device holds of a buffer, in the host's form."""
        stored = np.empty(ref.shape, STORED[ref.dtype])
        download(self._addresses(ref)[0], stored)
        return bf16_from_bits(stored) if ref.dtype == "bf16" else stored

    def _step(self, span: slice, place: int = 0) -> None:
        self.copy_in(place)
        for number in range(len(self._launches))[span]:
            self.queue(number)
            if self._backend.check:
                self.examine(number)
        self.copy_out(place)
        self._done[place].record(self._backend.stream)

    def _copy_words(self, source: Address, to: Address, size: int, times: Address) -> None:
        op = CopyWords.of(size)
        launch = op.launch(self._backend.device.arch)
        packed = args.pack(op, {op.x: (source,), op.y: (to,), op.times: (times,)}.__getitem__)
        self._backend.stream.launch(self._copy, launch.grid, launch.block, 0, packed)

    def _graph(self, place: int) -> Graph:
        if place not in self._graphs:
            self._graphs[place] = self._capture(place)
        return self._graphs[place]

    def _capture(self, place: int) -> Graph:
        graph = Graph(self._backend.stream)
        self.copy_in(place)
        for number in range(len(self._launches)):
            self.queue(number)
        self.copy_out(place)
        graph.finish()
        return graph
