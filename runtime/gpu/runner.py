"""One plan on the GPU: buffers placed, arguments packed, captured as a graph and replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
_STATIC_SHARED = 48 << 10
_IO_ALIGNMENT = 64


@dataclass(frozen=True)
class CopyWords(Op):
    """y = x, one of them in pinned host memory. [n] u64, n even."""

    x: Ref
    y: Ref

    @classmethod
    def stem(cls) -> str:
        """It stands in no plan: a step's io is the runner's affair."""
        return "host/copy_words"

    @classmethod
    def of(cls, size: int) -> CopyWords:
        """A copy of `size` bytes, a multiple of 16."""
        words = (size // 8,)
        return cls(Ref("x", words, "u64", Life.IO), Ref("y", words, "u64", Life.IO))

    def geometry(self) -> Geometry:
        """One CTA: a step's io is a few kilobytes."""
        return Geometry(1)


class CudaRunner:
    """One plan on the GPU: implements `Runner`.

    Io lies in pinned memory and on the device alike, in three stretches: what the host writes,
    which every step brings in; the record, which every step brings out; and what is rarely written,
    which goes over when it is.
    """

    def __init__(
        self, backend: CudaBackend, plan: Plan, functions: dict[Node, Function], copy: Function,
        shared: Pinned | None = None,
    ) -> None:  # fmt: skip
        """Place buffers, pack arguments; the graph is captured at the first whole run.

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
            if launch.shared > _STATIC_SHARED:
                function.allow_shared(launch.shared)
            packed = args.pack(node.op, self._addresses, backend.exchange, turn)
            turn += pieces(node.op) if node.op.COLLECTIVE else 0
            self._launches.append((node, function, launch, packed))
        self._graph: Graph | None = None

    def run(self, span: slice | None = None) -> None:
        """Replay the whole plan, or launch the nodes of `span` one by one; returns when done."""
        if span is None:
            self.launch()
        else:
            self._step(span)
        self.wait()

    def launch(self) -> None:
        """Queue the whole plan on the backend's stream; the first time captures it."""
        if self._backend.eager:
            self._step(slice(None))
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.launch()

    def wait(self) -> None:
        """Wait for what was queued last, without holding the interpreter lock."""
        self._backend.stream.wait()

    @property
    def nodes(self) -> int:
        """Nodes of the captured graph, 0 before the first run."""
        return self._graph.nodes if self._graph else 0

    @property
    def io_bytes(self) -> int:
        """What a step copies to the device and back."""
        return self._host_bytes + self._record_bytes

    def close(self) -> None:
        """Give scratch, io and graph back; the runner is of no use afterwards."""
        if self._graph:
            self._graph.close()
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

    def write(self, name: str, value: Array) -> None:
        """Put `value` into an io or scratch buffer.

        Raises:
            DeviceError: when the plan has no such buffer, or the shape differs.
        """
        ref = self.plan.buffers.get(name)
        if ref is None or ref.life not in (Life.IO, Life.SCRATCH):
            raise DeviceError(f"plan {self.plan.name} has no io or scratch buffer {name!r}")
        if value.shape != ref.shape:
            raise DeviceError(f"buffer {ref} cannot take an array of shape {value.shape}")
        if name in self._io:
            self._io[name][...] = value
            if name in RARE or name in RESULTS:  # steps bring in neither
                upload(self._io_at[name], self._io[name])
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
        self._record_bytes = sum(sizes[ref.name] for ref in record)
        whole = sum(sizes.values())
        self.pinned, self._io_base = shared or Pinned(whole), allocate(whole, "io")
        self._io: dict[str, Array] = {}
        self._io_at: dict[str, Address] = {}
        offset = 0
        for ref in host + record + rare:
            self._io[ref.name] = self.pinned.view(offset, ref.shape, STORED[ref.dtype])
            self._io_at[ref.name] = self._io_base + offset
            offset += sizes[ref.name]

    def _addresses(self, ref: Ref) -> tuple[Address, ...]:
        if ref.life is Life.WEIGHT:
            return self._backend.weight(ref)
        if ref.life is Life.STATE:
            return (self._backend.state(ref),)
        return (self._io_at[ref.name] if ref.life is Life.IO else self._scratch[ref.name],)

    def copy_in(self) -> None:
        """Queue what the host wrote."""
        self._copy_words(self.pinned.address, self._io_base, self._host_bytes)

    def queue(self, number: int) -> None:
        """Queue a node."""
        _, function, launch, packed = self._launches[number]
        self._backend.stream.launch(function, launch.grid, launch.block, launch.shared, packed)

    def copy_out(self) -> None:
        """Queue what the host reads."""
        at = self._host_bytes
        self._copy_words(self._io_base + at, self.pinned.address + at, self._record_bytes)

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

    def _step(self, span: slice) -> None:
        self.copy_in()
        for number in range(len(self._launches))[span]:
            self.queue(number)
            if self._backend.check:
                self.examine(number)
        self.copy_out()

    def _copy_words(self, source: Address, to: Address, size: int) -> None:
        if size:
            op = CopyWords.of(size)
            launch = op.launch(self._backend.device.arch)
            packed = args.pack(op, {op.x: (source,), op.y: (to,)}.__getitem__)
            self._backend.stream.launch(self._copy, launch.grid, launch.block, 0, packed)

    def _capture(self) -> Graph:
        graph = Graph(self._backend.stream)
        self.copy_in()
        for number in range(len(self._launches)):
            self.queue(number)
        self.copy_out()
        graph.finish()
        return graph
