"""The CUDA driver as this backend uses it: device, context, streams, memory, modules, graphs.

Every call is checked; an error becomes a `DeviceError` that says what was asked and what CUDA said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as cu

from ultraflash.runtime.errors import DeviceError

Address = int
OLDEST_DRIVER = 13000  # CUDA version that the driver must support: cubins come from NVRTC 13.0


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call.

    Raises:
        DeviceError: naming what was asked and CUDA's own words, when the call failed.
    """
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what} failed: {_words(error)}")
    return values[0] if len(values) == 1 else tuple(values)


def device_count() -> int:
    """How many GPUs there are; 0 without a driver."""
    try:
        (error,) = cu.cuInit(0)
    except RuntimeError:  # the bindings find no libcuda
        return 0
    if error != cu.CUresult.CUDA_SUCCESS:
        return 0
    return int(check(cu.cuDeviceGetCount(), "counting GPUs"))


@dataclass(frozen=True)
class Device:
    """A GPU with its primary context current in this thread."""

    ordinal: int
    name: str
    arch: str
    total_bytes: int

    @classmethod
    def open(cls, ordinal: int = 0) -> Device:
        """Take a GPU.

        Raises:
            DeviceError: no driver, no such GPU, a driver or an architecture that is too old.
        """
        count = device_count()
        if ordinal >= count:
            raise DeviceError(
                f"GPU {ordinal} was asked for and {count} are there: check nvidia-smi, or run on "
                f"the CPU with UF_BACKEND=numpy"
            )
        version = check(cu.cuDriverGetVersion(), "reading the driver's version")
        if version < OLDEST_DRIVER:
            raise DeviceError(
                f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, "
                f"CUDA {OLDEST_DRIVER // 1000}.0 is needed: update the driver to 580 or later"
            )
        device = check(cu.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
        major, minor = (
            check(cu.cuDeviceGetAttribute(a, device), "reading the compute capability")
            for a in (
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        name = check(cu.cuDeviceGetName(128, device), "reading the name").split(b"\0")[0].decode()
        arch = f"sm_{major}{minor}a"
        if arch not in ("sm_90a", "sm_100a", "sm_103a"):
            raise DeviceError(
                f"GPU {ordinal} ({name}) is {arch}, kernels exist for sm_90a, sm_100a and sm_103a: "
                f"use a Hopper or Blackwell GPU, or UF_BACKEND=numpy"
            )
        context = check(cu.cuDevicePrimaryCtxRetain(device), f"taking GPU {ordinal}")
        check(cu.cuCtxSetCurrent(context), f"taking GPU {ordinal}")
        _, total = check(cu.cuMemGetInfo(), "reading the memory size")
        return cls(ordinal, name, arch, int(total))


def allocate(size: int, what: str) -> Address:
    """Zeroed device memory.

    Raises:
        DeviceError: naming what it was for, its size and what is free.
    """
    error, address = cu.cuMemAlloc(max(size, 1))
    if error != cu.CUresult.CUDA_SUCCESS:
        free, total = check(cu.cuMemGetInfo(), "reading the memory size")
        raise DeviceError(
            f"{what} needs {size / 2**30:.2f} GiB of GPU memory, {free / 2**30:.2f} of "
            f"{total / 2**30:.2f} GiB are free: lower the context or --max-sequences, or end what "
            f"else runs on this GPU"
        )
    check(cu.cuMemsetD8(address, 0, max(size, 1)), f"clearing {what}")
    return int(address)


def upload(address: Address, array: npt.NDArray[Any]) -> None:
    """Copy a host array to the device and wait."""
    data = np.ascontiguousarray(array)
    if data.nbytes:
        check(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes), "copying to the GPU")


def download(address: Address, array: npt.NDArray[Any]) -> None:
    """Fill a contiguous host array from the device and wait."""
    if array.nbytes:
        check(cu.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes), "copying from the GPU")


def clear(address: Address, size: int) -> None:
    """Zero device memory."""
    check(cu.cuMemsetD8(address, 0, size), "clearing GPU memory")


class Pinned:
    """Host memory that the device copies from and to without staging."""

    def __init__(self, size: int) -> None:
        """Allocate zeroed bytes; they live as long as the process."""
        self.address: Address = int(check(cu.cuMemAllocHost(max(size, 1)), "pinning host memory"))
        import ctypes

        raw = (ctypes.c_uint8 * max(size, 1)).from_address(self.address)
        self.bytes = np.frombuffer(raw, np.uint8)
        self.bytes[:] = 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A typed window into it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.bytes[offset : offset + size].view(dtype).reshape(shape)


class Function:
    """A kernel of a loaded module."""

    def __init__(self, cubin: bytes, entry: str) -> None:
        """Load a cubin.

        Raises:
            DeviceError: when the driver refuses it.
        """
        self._module = check(cu.cuModuleLoadData(cubin), f"loading {entry}")
        self.handle = check(
            cu.cuModuleGetFunction(self._module, entry.encode()), f"finding {entry}"
        )

    def allow_shared(self, size: int) -> None:
        """Permit more dynamic shared memory than the default 48 KiB."""
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(self.handle, attribute, size), "raising shared memory")


class Stream:
    """A queue of work on the device."""

    def __init__(self) -> None:
        """Make one that does not wait for the default stream."""
        flag = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = check(cu.cuStreamCreate(flag), "making a stream")

    def launch(
        self, f: Function, grid: Sequence[int], block: Sequence[int], shared: int, args: bytes
    ) -> None:
        """Queue a kernel whose one parameter is `args`."""
        buffer = np.frombuffer(args, np.uint8).copy()
        pointers = np.array([buffer.ctypes.data], np.uint64)
        check(
            cu.cuLaunchKernel(
                f.handle, *grid, *block, shared, self.handle, pointers.ctypes.data, 0
            ),
            "launching a kernel",
        )

    def copy_in(self, address: Address, host: Address, size: int) -> None:
        """Queue a copy from pinned memory."""
        check(cu.cuMemcpyHtoDAsync(address, host, size, self.handle), "copying to the GPU")

    def copy_out(self, host: Address, address: Address, size: int) -> None:
        """Queue a copy to pinned memory."""
        check(cu.cuMemcpyDtoHAsync(host, address, size, self.handle), "copying from the GPU")

    def wait(self) -> None:
        """Wait until everything queued is done, without holding the interpreter lock."""
        check(cu.cuStreamSynchronize(self.handle), "a step")


class Graph:
    """Work captured from a stream, launched as one."""

    def __init__(self, stream: Stream) -> None:
        """Begin to capture what is queued on `stream`, until `finish`."""
        self._stream = stream
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream.handle, mode), "beginning a capture")
        self._exec: Any = None
        self.nodes = 0

    def finish(self) -> None:
        """End the capture and make it launchable."""
        graph = check(cu.cuStreamEndCapture(self._stream.handle), "ending a capture")
        _, count = check(cu.cuGraphGetNodes(graph, 0), "counting graph nodes")
        self.nodes = int(count)
        self._exec = check(cu.cuGraphInstantiate(graph, 0), "instantiating a graph")
        check(cu.cuGraphUpload(self._exec, self._stream.handle), "uploading a graph")
        check(cu.cuGraphDestroy(graph), "releasing a captured graph")

    def launch(self) -> None:
        """Queue it."""
        check(cu.cuGraphLaunch(self._exec, self._stream.handle), "launching a graph")


def _words(error: Any) -> str:
    _, name = cu.cuGetErrorName(error)
    _, text = cu.cuGetErrorString(error)
    return f"{name.decode()} ({text.decode()})"
