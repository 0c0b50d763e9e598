"""A CUDA driver made of host memory: kernels do nothing, copies copy, errors come on demand.

It stands where `runtime/gpu/driver.py` has the bindings (`cu`). Enumerations are the bindings' own;
a call that this driver does not know is an error of the test. Copies outside of what was allocated
fail, as a memory checker would have it. Work on streams is done at once, or, for tests that want
to see what order is really asked for, as late as events and waits allow (`lazy`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
_ATTRIBUTE = real.CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """What a fake GPU says of itself."""

    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 1 << 33
    l2_bytes: int = 1 << 16  # small, so that tests need not fill much more than it
    num_sms: int = 4


@dataclass(eq=False)
class Queue:
    """A stream: work that has not been done yet, numbered."""

    lock: Any
    context: str
    work: deque[tuple[int, Callable[[], Any]]] = field(default_factory=deque)
    count: int = 0

    def push(self, step: Callable[[], Any]) -> int:
        with self.lock:
            self.count += 1
            self.work.append((self.count, step))
            return self.count

    def run_to(self, number: int) -> None:
        """Do everything up to a piece of work; another thread may have done it already."""
        with self.lock:
            while self.work and self.work[0][0] <= number:
                self.work.popleft()[1]()


@dataclass(eq=False)
class Moment:
    """An event: where it was recorded last, and when that happened."""

    at: float = 0.0
    queue: Queue | None = None
    number: int = 0

    def happen(self) -> None:
        if self.queue:
            self.queue.run_to(self.number)


@dataclass
class FakeCuda:
    """State of the driver. `fail` maps a call's name to the error that it answers from now on;
    `kernels` gives the ones that do something: the size of their arguments, and what they do with
    their bytes and grid.
    """

    gpus: tuple[Gpu, ...] = (Gpu(),)
    version: int = 13000
    library: bool = True  # whether there is a libcuda at all
    fail: dict[str, Any] = field(default_factory=dict)
    # function, grid, block, shared
    launches: list[tuple[Any, ...]] = field(default_factory=list, repr=False)
    allocated: dict[int, Any] = field(default_factory=dict, repr=False)
    pinned: dict[int, Any] = field(default_factory=dict, repr=False)
    linked: bool = True  # whether GPUs can reach each other's memory
    reached: list[tuple[str, str]] = field(default_factory=list)  # (context, peer)
    graph_launches: int = 0
    lazy: bool = False  # work waits until somebody waits for it
    kernels: dict[str, tuple[int, Callable[[bytes, tuple[int, ...]], None]]] = field(
        default_factory=dict, repr=False
    )
    _lock: Any = field(default_factory=threading.RLock, repr=False)
    _queues: list[Queue] = field(default_factory=list, repr=False)
    _capture: list[Callable[[], None]] | None = None
    _captured: set[Any] = field(default_factory=set, repr=False)  # streams that are captured
    _apart: set[Any] = field(default_factory=set, repr=False)  # of these, that have not joined
    _here: threading.local = field(default_factory=threading.local, repr=False)

    def __post_init__(self) -> None:
        self.kernels["uf_move_rows"] = 170 * 24, self._move_rows

    def __getattr__(self, name: str) -> Any:
        """Enumerations of the real bindings; calls are those below."""
        assert not name.startswith("cu") or name[2].islower(), f"the fake driver lacks {name}"
        return getattr(real, name)

    def __getattribute__(self, name: str) -> Any:
        """Calls fail where a test wants it."""
        error = object.__getattribute__(self, "fail").get(name)
        return (lambda *_: (error,)) if error else object.__getattribute__(self, name)

    @property
    def current(self) -> str:
        """The context that is current in this thread."""
        return getattr(self._here, "current", "")

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        if not self.library:
            raise RuntimeError("libcuda is an NVIDIA driver library and was not found")
        return (OK,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return OK, self.version

    def cuGetErrorName(self, error: Any) -> tuple[Any, ...]:
        return OK, error.name.encode()

    def cuGetErrorString(self, error: Any) -> tuple[Any, ...]:
        return OK, error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, len(self.gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return OK, ordinal

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:
        return OK, self.gpus[device].name.encode().ljust(size, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        gpu = self.gpus[device]
        return OK, {
            _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: gpu.capability[0],
            _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: gpu.capability[1],
            _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: gpu.l2_bytes,
            _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: gpu.num_sms,
        }[attribute]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return OK, f"context of GPU {device}"

    def cuCtxSetCurrent(self, context: str) -> tuple[Any, ...]:
        self._here.current = context
        return (OK,)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Any, ...]:
        assert device != peer
        return OK, int(self.linked)

    def cuCtxEnablePeerAccess(self, peer: str, flags: int) -> tuple[Any, ...]:
        assert peer != self.current, "a GPU is no peer of its own"
        if (self.current, peer) in self.reached:
            return (real.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self.reached.append((self.current, peer))
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        total = self.gpus[0].total_bytes
        return OK, total - self.used_bytes, total

    @property
    def used_bytes(self) -> int:
        """Of device memory."""
        return sum(a.nbytes for a in self.allocated.values())

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        if self.used_bytes + size > self.gpus[0].total_bytes:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        memory = np.full(size, 0xCD, np.uint8)  # nothing may rely on what was there
        self.allocated[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        del self.allocated[address]
        return (OK,)

    def cuMemAllocHost(self, size: int) -> tuple[Any, ...]:
        memory = np.full(size, 0xCD, np.uint8)
        self.pinned[memory.ctypes.data] = memory
        return OK, memory.ctypes.data

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Any, ...]:
        self._inside(address, size)
        ctypes.memset(address, value, size)
        return (OK,)

    def cuMemcpyHtoD(self, to: int, source: int, size: int) -> tuple[Any, ...]:
        self._inside(to, size)
        ctypes.memmove(to, source, size)
        return (OK,)

    def cuMemcpyDtoH(self, to: int, source: int, size: int) -> tuple[Any, ...]:
        self._inside(source, size)
        ctypes.memmove(to, source, size)
        return (OK,)

    def cuMemcpyDtoD(self, to: int, source: int, size: int) -> tuple[Any, ...]:
        self._inside(to, size)
        return self.cuMemcpyDtoH(to, source, size)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: Any) -> tuple[Any, ...]:
        return self._queue(stream, lambda: self.cuMemcpyHtoD(to, source, size))

    def cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: Any) -> tuple[Any, ...]:
        return self._queue(stream, lambda: self.cuMemcpyDtoH(to, source, size))

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        return OK, cubin

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        found = b"\0" + name + b"\0" in module
        return (OK, name.decode()) if found else (real.CUresult.CUDA_ERROR_NOT_FOUND, None)

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[Any, ...]:
        return (OK,)

    def cuStreamCreate(self, flag: Any) -> tuple[Any, ...]:
        self._queues.append(Queue(self._lock, self.current))
        return OK, real.CUstream(len(self._queues))

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        assert self._capture is None, "waiting is not allowed while a graph is captured"
        if int(stream):  # 0: the default one, where everything is done at once
            queue = self._queues[int(stream) - 1]
            queue.run_to(queue.count)
        return (OK,)

    def cuStreamWaitEvent(self, stream: Any, event: Moment, flags: int) -> tuple[Any, ...]:
        queue, other = self._queue_of(stream), event.queue
        if self._capture is None:
            return self._queue(stream, Moment(0.0, other, event.number).happen)
        if other in self._captured:
            if queue not in self._captured:
                self._captured.add(queue)
                self._apart.add(queue)
            self._apart.discard(other)
        return (OK,)

    def cuLaunchKernelEx(
        self, config: Any, function: str, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        launch = function, grid, block, config.sharedMemBytes
        size, act = self.kernels.get(function, (0, lambda raw, grid: None))
        raw = ctypes.string_at(ctypes.c_uint64.from_address(parameters).value, size)

        def run() -> None:
            self.launches.append(launch)
            act(raw, grid)

        return self._queue(config.hStream, run)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        self._capture, self._captured, self._apart = [], {self._queue_of(stream)}, set()
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        assert not self._apart, f"streams {self._apart} have left the capture's and not joined it"
        graph, self._capture = self._capture, None
        return OK, graph

    def cuGraphGetNodes(self, graph: list[Any], count: int) -> tuple[Any, ...]:
        return OK, [], len(graph)

    def cuGraphInstantiate(self, graph: list[Any], flags: int) -> tuple[Any, ...]:
        return OK, graph

    def cuGraphUpload(self, graph: list[Any], stream: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphDestroy(self, graph: list[Any]) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphExecDestroy(self, graph: list[Any]) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphLaunch(self, graph: list[Callable[[], None]], stream: Any) -> tuple[Any, ...]:
        self.graph_launches += 1
        for step in graph:
            self._queue(stream, step)
        return (OK,)

    def cuEventCreate(self, flag: Any) -> tuple[Any, ...]:
        return OK, Moment()

    def cuEventRecord(self, event: Moment, stream: Any) -> tuple[Any, ...]:
        event.queue = self._queue_of(stream)
        if self._capture is None:
            self._queue(stream, lambda: setattr(event, "at", time.perf_counter()))
        event.number = event.queue.count
        return (OK,)

    def cuEventSynchronize(self, event: Moment) -> tuple[Any, ...]:
        event.happen()
        return (OK,)

    def cuEventRecordWithFlags(self, event: Moment, stream: Any, flag: Any) -> tuple[Any, ...]:
        assert flag == real.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        assert self._capture is not None, "such an event belongs into a graph"
        return self._queue(stream, lambda: setattr(event, "at", time.perf_counter()))

    def cuEventElapsedTime(self, start: Moment, end: Moment) -> tuple[Any, ...]:
        return OK, 1e3 * (end.at - start.at)

    def _move_rows(self, raw: bytes, grid: tuple[int, ...]) -> None:
        """What ptx/state/move_rows.cu does."""
        for to, source, size in np.frombuffer(raw, np.uint64).reshape(-1, 3)[: grid[0]].tolist():
            self.cuMemcpyDtoD(to, source, size)

    def _queue_of(self, stream: Any) -> Queue:
        queue = self._queues[int(stream) - 1]
        assert queue.context == self.current, (
            f"a stream of {queue.context} while {self.current} is current"
        )
        return queue

    def _queue(self, stream: Any, step: Callable[[], Any]) -> tuple[Any, ...]:
        queue = self._queue_of(stream)
        if self._capture is not None:
            assert queue in self._captured, "a graph is captured, and this stream has no part in it"
            self._capture.append(step)
            return (OK,)
        number = queue.push(step)
        if not self.lazy:
            queue.run_to(number)
        return (OK,)

    def _inside(self, address: int, size: int) -> None:
        starts = sorted(self.allocated)
        base = starts[bisect_right(starts, address) - 1]
        fits = base <= address and address + size <= base + self.allocated[base].nbytes
        assert fits, f"{size} bytes at {address:#x} lie in no allocation"
