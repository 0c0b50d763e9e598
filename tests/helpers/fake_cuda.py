"""A CUDA driver made of host memory: kernels do nothing, copies copy, errors come on demand.

It stands where `runtime/gpu/driver.py` has the bindings (`cu`). Enumerations are the bindings' own;
a call that this driver does not know is an error of the test. Copies outside of what was allocated
fail, as a memory checker would have it.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
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


@dataclass
class FakeCuda:
    """State of the driver. `fail` maps a call's name to the error that it answers from now on."""

    gpus: tuple[Gpu, ...] = (Gpu(),)
    version: int = 13000
    library: bool = True  # whether there is a libcuda at all
    fail: dict[str, Any] = field(default_factory=dict)
    # function, grid, block, shared
    launches: list[tuple[Any, ...]] = field(default_factory=list, repr=False)
    allocated: dict[int, Any] = field(default_factory=dict, repr=False)
    pinned: dict[int, Any] = field(default_factory=dict, repr=False)
    graph_launches: int = 0
    _capture: list[Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Any:
        """Enumerations of the real bindings; calls are those below."""
        assert not name.startswith("cu") or name[2].islower(), f"the fake driver lacks {name}"
        return getattr(real, name)

    def __getattribute__(self, name: str) -> Any:
        """Calls fail where a test wants it."""
        error = object.__getattribute__(self, "fail").get(name)
        return (lambda *_: (error,)) if error else object.__getattribute__(self, name)

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
        return self._queue(lambda: self.cuMemcpyHtoD(to, source, size))

    def cuMemcpyDtoHAsync(self, to: int, source: int, size: int, stream: Any) -> tuple[Any, ...]:
        return self._queue(lambda: self.cuMemcpyDtoH(to, source, size))

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        return OK, cubin

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        found = b"\0" + name + b"\0" in module
        return (OK, name.decode()) if found else (real.CUresult.CUDA_ERROR_NOT_FOUND, None)

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[Any, ...]:
        return (OK,)

    def cuStreamCreate(self, flag: Any) -> tuple[Any, ...]:
        return OK, real.CUstream(1)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        assert self._capture is None, "waiting is not allowed while a graph is captured"
        return (OK,)

    def cuModuleGetGlobal(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        found = b"\0" + name + b"\0" in module
        return (OK, 1, 4) if found else (real.CUresult.CUDA_ERROR_NOT_FOUND, None, None)

    def cuLaunchKernelEx(
        self, config: Any, function: str, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        launch = function, grid, block, config.sharedMemBytes
        return self._queue(lambda: self.launches.append(launch))

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        self._capture = []
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
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
            step()
        return (OK,)

    def cuEventCreate(self, flag: Any) -> tuple[Any, ...]:
        return OK, [0.0]

    def cuEventRecord(self, event: list[float], stream: Any) -> tuple[Any, ...]:
        event[0] = time.perf_counter()
        return (OK,)

    def cuEventElapsedTime(self, start: list[float], end: list[float]) -> tuple[Any, ...]:
        return OK, 1e3 * (end[0] - start[0])

    def _queue(self, step: Callable[[], Any]) -> tuple[Any, ...]:
        if self._capture is None:
            step()
        else:
            self._capture.append(step)
        return (OK,)

    def _inside(self, address: int, size: int) -> None:
        starts = sorted(self.allocated)
        base = starts[bisect_right(starts, address) - 1]
        fits = base <= address and address + size <= base + self.allocated[base].nbytes
        assert fits, f"{size} bytes at {address:#x} lie in no allocation"
