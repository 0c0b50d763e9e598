"""One rank: weights and state on one GPU, plans compiled and handed to runners.

Buffers hold what graphs/plan.py says, bf16 as two bytes; weights lie as runtime/weights/layout.py
says. The host sees the reference operations' form (bf16 as float32), so that tests compare like
with like.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from ultraflash import ptx
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Op, Plan, Ref
from ultraflash.runtime.backend import Array, Bytes, Rows, Staged, check_size
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.errors import ConfigError, DeviceError
from ultraflash.runtime.gpu.copies import UNIT, Copies, Span
from ultraflash.runtime.gpu.driver import (
    Address,
    Device,
    Function,
    Pinned,
    Stream,
    allocate,
    clear,
    download,
    upload,
)
from ultraflash.runtime.gpu.exchange import Exchange
from ultraflash.runtime.gpu.nvrtc import Unit, compile_units, version
from ultraflash.runtime.gpu.runner import STORED, CopyWords, CudaRunner
from ultraflash.runtime.gpu.uploader import Uploader
from ultraflash.runtime.weights.device import DeviceWeights, Progress, upload_weights
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.layout import LAYOUTS


def other_units() -> dict[Unit, Op | None]:
    """Kernels of every server that stand in no plan: for io, for weights, for moving state. With
    their operations; the last has none.
    """
    ops = (CopyWords.of(0), *(layout.of(layout.ROWS, 32) for layout in LAYOUTS))
    return {Unit.of(op): op for op in ops} | {UNIT: None}


class CudaBackend:
    """Implements `Backend` on one GPU: the only one, or one rank of several (group.py)."""

    def __init__(
        self, device: Device, weights: DeviceWeights, cache_dir: Path, *, eager: bool = False,
        check: bool = False, keep_scratch: bool = False, exchange: Exchange | None = None,
        overlap: bool = True,
    ) -> None:  # fmt: skip
        """Nothing is compiled yet.

        `exchange`: how this rank reaches the others of its world; the weights are its part.

        `eager` launches node by node instead of replaying graphs; `check` also waits and looks for
        NaN after each node; `keep_scratch` lets every buffer be read after a step; `overlap` is
        that of `Stream`.
        """
        self.device, self._weights, self._cache_dir = device, weights, cache_dir
        self.eager, self.check, self.keep_scratch = eager or check, check, keep_scratch
        self.exchange = exchange
        self.stream = Stream(overlap=overlap)
        self._state: dict[str, tuple[Ref, Address]] = {}
        self._row_bytes: dict[str, int] = {}  # of a state buffer's row
        self._functions: dict[Unit, Function] = {}

    @classmethod
    def open(
        cls, config: RuntimeConfig, index: CheckpointIndex, model: Model,
        progress: Progress | None = None, *, keep_scratch: bool = False,
    ) -> CudaBackend:  # fmt: skip
        """Take a GPU and put a checkpoint's weights on it.

        Raises:
            ConfigError: when not one GPU is named.
            DeviceError: when there is no fitting GPU, or its memory does not suffice.
            WeightsError: when the checkpoint does not fit the model.
        """
        if len(config.gpus) != 1:
            raise ConfigError(f"one GPU is used here, UF_GPUS names {len(config.gpus)}: name one")
        device = Device.open(config.gpus[0])
        with Uploader(device, config.cache_dir) as uploader:
            weights = upload_weights(index, model, uploader.place, progress, config.cache_dir)
        return cls(device, weights, config.cache_dir, eager=config.eager, check=config.check,
                   keep_scratch=keep_scratch)  # fmt: skip

    @classmethod
    def emulated(
        cls, device: Device, weights: DeviceWeights, cache_dir: Path, *, world: int, rank: int = 0,
        hop_us: float = 2.0, **options: bool,
    ) -> CudaBackend:  # fmt: skip
        """One rank of a world whose others are not there, for timing its steps.

        Collectives send as much as ever, to this GPU, and wait `hop_us` for it. What comes out
        means nothing: `facts` refuses, so that no engine can be made of it.

        Raises:
            DeviceError: when there is no such rank, or the GPU has no room.
        """
        exchange = Exchange.loop_back(world, rank, hop_us)
        return cls(device, weights, cache_dir, exchange=exchange, **options)

    places = CudaRunner.places

    @property
    def arch(self) -> str:
        """The GPU's architecture."""
        return self.device.arch

    def facts(self) -> dict[str, Any]:
        """The compiler and every kernel source.

        Raises:
            DeviceError: when this is one rank of an emulated world.
        """
        if self.exchange and self.exchange.emulated:
            raise DeviceError(
                f"rank {self.exchange.rank} of an emulated world of {self.world} adds up its own "
                f"parts alone: its steps can be timed, what they compute has no meaning"
            )
        digests = [ptx.source(stem, self.arch).digest for stem in ptx.stems()]
        return {"nvrtc": version(), "kernels": blake3("".join(digests).encode()).hexdigest()}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.exchange.world if self.exchange else 1

    def compile(self, plan: Plan, shared: Pinned | None = None) -> CudaRunner:
        """Compile a plan's kernels and allocate its buffers; `shared` as in `CudaRunner`.

        Raises:
            CompileError: when a kernel does not compile.
            DeviceError: when memory does not suffice or a buffer was known with another shape.
        """
        if plan.world != self.world:
            raise DeviceError(
                f"plan {plan.name} is for world {plan.world}, this backend has {self.world} ranks"
            )
        units = {node: Unit.of_node(node) for node in plan.nodes}
        copy = Unit.of(CopyWords.of(0))
        self._load((*units.values(), copy))
        _ = self._copies  # its memory, too, is taken before the first step
        functions = {node: self._functions[unit] for node, unit in units.items()}
        return CudaRunner(self, plan, functions, self._functions[copy], shared)

    def clear_slot(self, slot: int) -> None:
        """Zero every state buffer of a slot."""
        self.stream.wait()
        for ref, address in self._state.values():
            size = ref.nbytes // ref.shape[0]
            clear(address + slot * size, size)

    def read_state(self, name: str, slot: int, start: int, end: int) -> Array:
        """A copy of rows [start, end) of a slot's state buffer, in its own type.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        ref, _ = self._named(name)
        rows = np.empty((end - start, *ref.shape[2:]), STORED[ref.dtype])
        self.stream.wait()  # for what `restore` has under way
        download(self._span(slot, Rows(name, start, end)).address, rows)
        return rows

    def write_state(self, name: str, slot: int, start: int, rows: Array) -> None:
        """Put rows into a slot's state buffer from row `start` on.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        ref, _ = self._named(name)
        self.stream.wait()
        span = self._span(slot, Rows(name, start, start + len(rows)))
        upload(span.address, rows.astype(STORED[ref.dtype], copy=False))

    def stage(self, slot: int, parts: Sequence[tuple[bytes, Sequence[Rows]]]) -> list[Staged]:
        """Begin to bring rows of a slot to the host, as the steps queued so far leave them.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        spans = [(head, [self._span(slot, some) for some in rows]) for head, rows in parts]
        return [*self._copies.stage(spans)]

    def restore(self, slot: int, parts: Sequence[tuple[Sequence[Rows], Bytes]]) -> None:
        """Put bytes into rows of a slot; steps queued from now on see them.

        Raises:
            DeviceError: when no plan has named such a buffer, or rows and bytes differ in size.
        """
        spans = []
        for rows, data in parts:
            some = [self._span(slot, one) for one in rows]
            check_size(rows, sum(size for _, size in some), len(data))
            spans += some
        self._copies.restore(spans, [data for _, data in parts])

    def _load(self, units: Iterable[Unit]) -> None:
        wanted = [u for u in units if u not in self._functions]
        for unit, kernel in compile_units(wanted, self.device.arch, self._cache_dir).items():
            self._functions[unit] = Function(kernel.cubin, unit.entry)

    @cached_property
    def _copies(self) -> Copies:
        self._load([UNIT])
        return Copies(self.device, self.stream, self._functions[UNIT])

    def _span(self, slot: int, rows: Rows) -> Span:
        name, start, end = rows
        ref, address = self._named(name)
        size = self._row_bytes[name]
        return Span(address + (slot * ref.shape[1] + start) * size, (end - start) * size)

    def _named(self, name: str) -> tuple[Ref, Address]:
        if name not in self._state:
            raise DeviceError(f"no plan has named a state buffer {name!r}")
        return self._state[name]

    def state(self, ref: Ref) -> Address:
        """A state buffer, allocated when first named."""
        known = self._state.get(ref.name)
        if known is None:
            known = self._state[ref.name] = ref, allocate(ref.nbytes, f"state {ref.name}")
            self._row_bytes[ref.name] = ref.nbytes // (ref.shape[0] * ref.shape[1])
        if known[0] != ref:
            raise DeviceError(f"state {ref} exists as {known[0]}: all plans need the same capacity")
        return known[1]

    def weight(self, ref: Ref) -> tuple[Address, ...]:
        """A weight's device pointers: codes and, where there are any, scales."""
        return self._weights.addresses(ref)
