"""Several GPUs as one backend: a rank on each, in one process, their steps one graph.

Weights are split, state is the same on every rank. Calls are about the current GPU, which is rank
0's except inside `each`. The host writes io once: every rank copies it in, rank 0 copies it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ultraflash.graphs.io import RARE, RESULTS
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan
from ultraflash.runtime.backend import Array, Bytes, Rows, Staged
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu.backend import CudaBackend
from ultraflash.runtime.gpu.driver import Device, Event, Graph, Stream
from ultraflash.runtime.gpu.exchange import Exchange, check_world, inbox
from ultraflash.runtime.gpu.runner import CudaRunner
from ultraflash.runtime.gpu.uploader import Uploader
from ultraflash.runtime.weights.device import DeviceWeights, Progress, upload_weights
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.part import Part

T = TypeVar("T")


class GroupBackend:
    """Implements `Backend` on as many GPUs as there are ranks."""

    def __init__(self, ranks: list[CudaBackend]) -> None:
        """Take what `join` made of some devices."""
        self.ranks = ranks
        self.world = len(ranks)

    places = 1  # a graph over several GPUs is captured once, and nothing runs ahead of its record

    @classmethod
    def open(
        cls, config: RuntimeConfig, index: CheckpointIndex, model: Model,
        progress: Progress | None = None, *, keep_scratch: bool = False,
    ) -> GroupBackend:  # fmt: skip
        """Take `config.gpus`, in rank order, and put a checkpoint's weights on them.

        Raises:
            DeviceError: when one does not fit, cannot reach another, or its memory does not
                suffice.
            WeightsError: when the checkpoint does not fit the model or cannot be split.
        """
        devices = [Device.open(ordinal) for ordinal in config.gpus]
        weights = []
        for rank, device in enumerate(devices):
            device.enter()
            part = Part(len(devices), rank)
            with Uploader(device, config.cache_dir) as uploader:
                weights.append(
                    upload_weights(index, model, uploader.place, _of_all(progress, part),
                                   config.cache_dir, part)
                )  # fmt: skip
        return cls.join(devices, weights, config.cache_dir, eager=config.eager, check=config.check,
                        keep_scratch=keep_scratch)  # fmt: skip

    @classmethod
    def join(
        cls, devices: list[Device], weights: list[DeviceWeights], cache_dir: Path, **options: bool
    ) -> GroupBackend:
        """A rank on each device, all reaching each other; `options` as those of `CudaBackend`.

        One device may be given several times: its ranks then run side by side.

        Raises:
            DeviceError: when there are too many, they differ, or one cannot reach another.
        """
        check_world(len(devices))
        if len({device.arch for device in devices}) > 1:
            found = ", ".join(f"GPU {d.ordinal} is {d.arch}" for d in devices)
            raise DeviceError(f"one architecture is needed, {found}: choose GPUs of one kind")
        inboxes = []
        for device in devices:
            device.enter()
            for peer in {d.ordinal: d for d in devices}.values():
                if peer.ordinal != device.ordinal:
                    device.reach(peer)
            inboxes.append(inbox(len(devices)))
        # A kernel that waits behind an exchange must not stand in another rank's way to its own.
        alone = len({device.ordinal for device in devices}) == len(devices)
        ranks = []
        for device, held, exchange in zip(
            devices, weights, Exchange.between(tuple(inboxes)), strict=True
        ):
            device.enter()
            ranks.append(
                CudaBackend(device, held, cache_dir, exchange=exchange, overlap=alone, **options)
            )
        devices[0].enter()
        return cls(ranks)

    @property
    def device(self) -> Device:
        """Rank 0's GPU."""
        return self.ranks[0].device

    @property
    def stream(self) -> Stream:
        """Rank 0's stream: steps are launched there, and end there."""
        return self.ranks[0].stream

    @property
    def arch(self) -> str:
        """The GPUs' architecture."""
        return self.device.arch

    def facts(self) -> dict[str, Any]:
        """The compiler and every kernel source."""
        return self.ranks[0].facts()

    def compile(self, plan: Plan) -> GroupRunner:
        """Compile a plan's kernels and allocate its buffers on every rank.

        Raises:
            CompileError: when a kernel does not compile.
            DeviceError: when memory does not suffice, the plan is for another world, or a buffer
                was known with another shape.
        """
        first = self.ranks[0].compile(plan)
        others = self.each(lambda rank: rank.compile(plan, first.pinned), slice(1, None))
        return GroupRunner(self, [first, *others])

    def clear_slot(self, slot: int) -> None:
        """Zero every state buffer of a slot on every rank."""
        self.stream.wait()  # where graphs of all ranks end
        self.each(lambda rank: rank.clear_slot(slot))

    def read_state(self, name: str, slot: int, start: int, end: int) -> Array:
        """A copy of rows [start, end) of rank 0's slot; the ranks hold the same.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        return self.ranks[0].read_state(name, slot, start, end)

    def write_state(self, name: str, slot: int, start: int, rows: Array) -> None:
        """Put rows into a slot's state buffer on every rank.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        self.stream.wait()
        self.each(lambda rank: rank.write_state(name, slot, start, rows))

    def stage(self, slot: int, parts: Sequence[tuple[bytes, Sequence[Rows]]]) -> list[Staged]:
        """Begin to bring rows of rank 0's slot to the host; the ranks hold the same.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        return self.ranks[0].stage(slot, parts)

    def restore(self, slot: int, parts: Sequence[tuple[Sequence[Rows], Bytes]]) -> None:
        """Put bytes into rows of a slot on every rank, and wait: steps are queued on rank 0's
        stream alone.

        Raises:
            DeviceError: when no plan has named such a buffer, or rows and bytes differ in size.
        """
        self.stream.wait()
        self.each(lambda rank: rank.restore(slot, parts))
        self.wait()

    def each(self, act: Callable[[CudaBackend], T], which: slice = slice(None)) -> list[T]:
        """What `act` gives for every rank (or some), its own GPU being the current one."""
        results = []
        try:
            for rank in self.ranks[which]:
                rank.device.enter()
                results.append(act(rank))
        finally:
            self.device.enter()
        return results

    def wait(self) -> None:
        """Wait until every rank has done everything queued."""
        self.each(lambda rank: rank.stream.wait())


class GroupRunner:
    """One plan on all ranks: implements `Runner`."""

    def __init__(self, backend: GroupBackend, runners: list[CudaRunner]) -> None:
        """Rank r's runner is `runners[r]`; `prepare` or the first whole run captures the graph."""
        self.plan = runners[0].plan
        self._backend, self._runners = backend, runners
        self._of = dict(zip((id(rank) for rank in backend.ranks), runners, strict=True))
        self._graph: Graph | None = None

    def run(self, span: slice | None = None) -> None:
        """Replay the whole plan, or launch the nodes of `span` one by one; returns when done."""
        if span is None:
            self.launch()
        else:
            self._step(span)
        self.wait()

    def prepare(self) -> None:
        """Capture the graph, unless nodes are launched one by one."""
        if not self._backend.ranks[0].eager:
            self._captured()

    def launch(self, place: int = 0) -> None:
        """Queue the whole plan on rank 0's stream; the first time captures it.

        A launch ends when all ranks have ended, and the next one begins after that.
        """
        if self._backend.ranks[0].eager:
            self._step(slice(None))
            return
        self._captured().launch()

    def wait(self, place: int = 0) -> None:
        """Wait for what was queued last."""
        self._backend.stream.wait()

    @property
    def times_ns(self) -> tuple[int, int]:
        """When the launch that was waited for last began and ended, by rank 0's clock."""
        return self._runners[0].times_ns

    @property
    def nodes(self) -> int:
        """Nodes of the captured graph over all ranks, 0 before the first run."""
        return self._graph.nodes if self._graph else 0

    @property
    def io_bytes(self) -> int:
        """What is copied to each device before a step, and back from one after it."""
        return self._runners[0].io_bytes

    def read(self, name: str, rank: int = 0) -> Array:
        """A buffer's contents on a rank, in the host's form.

        Raises:
            DeviceError: when the plan has no such buffer.
        """
        if not rank:
            return self._runners[0].read(name)
        ref = self.plan.buffers.get(name)
        if ref is None:
            raise DeviceError(f"plan {self.plan.name} has no buffer {name!r}")
        one = slice(rank, rank + 1)
        return self._backend.each(lambda _: self._runners[rank].download(ref), one)[0]

    def write(self, name: str, value: Array, place: int | None = None) -> None:
        """Put `value` into an io buffer, whose host side the ranks share, or into a scratch buffer.

        Raises:
            DeviceError: when the plan has no such buffer, or the shape differs.
        """
        ref = self.plan.buffers.get(name)
        if ref is None or ref.life is Life.SCRATCH or name in RARE + RESULTS:
            self._each(lambda runner: runner.write(name, value, place))
        else:
            self._runners[0].write(name, value, place)

    def _step(self, span: slice) -> None:
        self._each(lambda runner: runner.copy_in())
        for number in range(len(self.plan.nodes))[span]:
            # All ranks before anybody waits: a collective ends when all have begun it.
            self._each(lambda runner, number=number: runner.queue(number))  # type: ignore[misc]
            if self._backend.ranks[0].check:
                self._backend.wait()
                self._each(lambda runner, number=number: runner.examine(number))  # type: ignore[misc]
        self._backend.wait()
        self._runners[0].copy_out()

    def _each(self, act: Callable[[CudaRunner], None]) -> None:
        self._backend.each(lambda rank: act(self._of[id(rank)]))

    def _captured(self) -> Graph:
        if self._graph is None:
            self._graph = self._capture()
        return self._graph

    def _capture(self) -> Graph:
        """One graph over all devices: the other ranks' streams fork from rank 0's and join it."""
        stream = self._backend.stream
        graph, begun = Graph(stream), Event()
        begun.record(stream)

        def branch(rank: CudaBackend) -> Event:
            if rank.stream is not stream:
                rank.stream.wait_for(begun)
            runner, done = self._of[id(rank)], Event()
            runner.copy_in()
            for number in range(len(self.plan.nodes)):
                runner.queue(number)
            done.record(rank.stream)
            return done

        for done in self._backend.each(branch)[1:]:
            stream.wait_for(done)
        # Behind the join: others copy the same host memory in until they are done with it.
        self._runners[0].copy_out()
        graph.finish()
        return graph


def _of_all(progress: Progress | None, part: Part) -> Progress | None:
    """One rank's progress as that of all ranks, which load one after the other."""
    if progress is None:
        return None
    return lambda done, total: progress(part.rank * total + done, part.world * total)
