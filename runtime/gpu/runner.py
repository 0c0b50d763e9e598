"""One plan on the GPU: buffers placed, arguments packed, captured as a graph and replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ultraflash.graphs.numerics import bf16_bits, bf16_from_bits
from ultraflash.graphs.plan import Life, Node, Plan, Ref
from ultraflash.runtime.backend import Array
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu import args
from ultraflash.runtime.gpu.arena import Arena
from ultraflash.runtime.gpu.driver import (
    Address,
    Function,
    Graph,
    Pinned,
    Stream,
    allocate,
    download,
    upload,
)

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


class CudaRunner:
    """One plan on the GPU: implements `Runner`."""

    def __init__(self, backend: CudaBackend, plan: Plan, functions: dict[Node, Function]) -> None:
        """Place buffers, pack arguments; the graph is captured at the first whole run."""
        self.plan, self._backend = plan, backend
        self.arena = Arena.of(plan, keep_all=backend.keep_scratch)
        base = allocate(self.arena.size, f"scratch of {plan.name}")
        self._scratch = {p.name: base + p.offset for p in self.arena.places}
        self._place_io(plan)
        arch = backend.device.arch
        self._launches = []
        for node in plan.nodes:
            launch, function = node.op.launch(arch), functions[node]
            if launch.shared > _STATIC_SHARED:
                function.allow_shared(launch.shared)
            packed = args.pack(node.op, self._addresses)
            self._launches.append((node, function, launch, packed))
        self._graph: Graph | None = None

    def run(self, span: slice | None = None) -> None:
        """Replay the whole plan, or launch the nodes of `span` one by one; returns when done."""
        stream = self._backend.stream
        if span is not None or self._backend.eager:
            self._copy_in(stream)
            for node, function, launch, packed in self._launches[span or slice(None)]:
                stream.launch(function, launch.grid, launch.block, launch.shared, packed)
                if self._backend.check:
                    self._examine(node)
            self._copy_out(stream)
        else:
            self.launch()
        stream.wait()

    def launch(self) -> None:
        """Queue the whole plan on the backend's stream; the first time captures it."""
        if self._graph is None:
            self._graph = self._capture(self._backend.stream)
        self._graph.launch()

    @property
    def nodes(self) -> int:
        """Nodes of the captured graph, 0 before the first run."""
        return self._graph.nodes if self._graph else 0

    @property
    def io_bytes(self) -> int:
        """What is copied to the device before a step, and back after it."""
        return self._io_size

    def read(self, name: str, rank: int = 0) -> Array:
        """A buffer's contents, in the host's form.

        Raises:
            DeviceError: when the plan has no such buffer.
        """
        if name in self._io:
            return self._io[name]
        ref = self.plan.buffers.get(name)
        if ref is None:
            raise DeviceError(f"plan {self.plan.name} has no buffer {name!r}")
        stored = np.empty(ref.shape, STORED[ref.dtype])
        download(self._addresses(ref)[0], stored)
        return bf16_from_bits(stored) if ref.dtype == "bf16" else stored

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

    def _place_io(self, plan: Plan) -> None:
        offset, offsets = 0, {}
        for ref in plan.of_life(Life.IO):
            offsets[ref.name] = offset
            offset += -(-ref.nbytes // 64) * 64
        self._io_size = offset
        self._pinned, self._io_base = Pinned(offset), allocate(offset, "io")
        self._io = {
            ref.name: self._pinned.view(offsets[ref.name], ref.shape, STORED[ref.dtype])
            for ref in plan.of_life(Life.IO)
        }
        self._io_at = {name: self._io_base + at for name, at in offsets.items()}

    def _addresses(self, ref: Ref) -> tuple[Address, ...]:
        if ref.life is Life.WEIGHT:
            return self._backend.weight(ref)
        if ref.life is Life.STATE:
            return (self._backend.state(ref),)
        return (self._io_at[ref.name] if ref.life is Life.IO else self._scratch[ref.name],)

    def _capture(self, stream: Stream) -> Graph:
        graph = Graph(stream)
        self._copy_in(stream)
        for _, function, launch, packed in self._launches:
            stream.launch(function, launch.grid, launch.block, launch.shared, packed)
        self._copy_out(stream)
        graph.finish()
        return graph

    def _copy_in(self, stream: Stream) -> None:
        stream.copy_in(self._io_base, self._pinned.address, self._io_size)

    def _copy_out(self, stream: Stream) -> None:
        stream.copy_out(self._pinned.address, self._io_base, self._io_size)

    def _examine(self, node: Node) -> None:
        self._backend.stream.wait()
        for ref in node.op.writes():
            if ref.dtype not in ("bf16", "f32") or ref.life is Life.STATE:
                continue
            stored: Any = np.empty(ref.shape, STORED[ref.dtype])
            download(self._addresses(ref)[0], stored)
            values = bf16_from_bits(stored) if ref.dtype == "bf16" else stored
            if np.isnan(values).any():
                raise DeviceError(f"node {node.label} wrote NaN into {ref}")
