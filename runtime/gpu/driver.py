"""The CUDA driver as this backend uses it: device, context, streams, memory, modules, graphs.

Every call is checked; an error becomes a `DeviceError` that says what was asked and what CUDA said.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver as cu

from ultraflash.ptx import ARCHITECTURES
from ultraflash.runtime.errors import DeviceError

Address = int
OLDEST_DRIVER = 13000  # CUDA version that the driver must support: cubins come from NVRTC 13.0
_LOST = ": this process has lost the GPU and must start again, UF_CHECK=1 would name the node"
# What went wrong in work queued before, and is answered by every call from then on.
_LOSING = (
    cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,
    cu.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    cu.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    cu.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
    cu.CUresult.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    cu.CUresult.CUDA_ERROR_INVALID_PC,
    cu.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR,
    cu.CUresult.CUDA_ERROR_ASSERT,
    cu.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    cu.CUresult.CUDA_ERROR_NVLINK_UNCORRECTABLE,
    cu.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,
)
_LESS = "lower the context or --max-sequences, or end what else runs on this GPU"
_OTHERWISE = "run on the CPU with UF_BACKEND=numpy"


def check(result: tuple[Any, ...], what: str, remedy: str = "") -> Any:
    """The values of a driver call; `remedy` is for failures that say nothing of the whole GPU.

    Raises:
        DeviceError: naming what was asked and CUDA's own words, when the call failed.
    """
    error, *values = result
    if error != cu.CUresult.CUDA_SUCCESS:
        if error in _LOSING:
            remedy = _LOST
        elif error == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            remedy = f", {_room()}: {_LESS}"
        raise DeviceError(f"{what} failed: {_words(error)}{remedy}")
    return values[0] if len(values) == 1 else tuple(values)


def device_count() -> int:
    """How many GPUs there are; 0 without a driver."""
    return 0 if _start() else int(check(cu.cuDeviceGetCount(), "counting GPUs"))


def architecture(ordinal: int) -> str:
    """What code a GPU runs, as NVRTC names it: "sm_90a"."""
    device = check(cu.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
    attribute = cu.CUdevice_attribute
    major = _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return f"sm_{major}{minor}a"


@dataclass(frozen=True)
class Device:
    """A GPU with its primary context; after `open` it is current in this thread."""

    ordinal: int
    name: str
    arch: str
    total_bytes: int
    l2_bytes: int
    num_sms: int
    driver: int  # the CUDA version that the driver supports: 13000 is 13.0
    context: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def open(cls, ordinal: int = 0) -> Device:
        """Take a GPU.

        Raises:
            DeviceError: no driver, no such GPU, a driver or an architecture that is too old.
        """
        if trouble := _start():
            raise DeviceError(f"GPU {ordinal} was asked for, but {trouble}, or {_OTHERWISE}")
        count = device_count()
        if ordinal >= count:
            raise DeviceError(
                f"GPU {ordinal} was asked for and {count} are there: check nvidia-smi, or "
                f"{_OTHERWISE}"
            )
        version = int(check(cu.cuDriverGetVersion(), "reading the driver's version"))
        if version < OLDEST_DRIVER:
            raise DeviceError(
                f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, CUDA "
                f"{OLDEST_DRIVER // 1000}.0 is needed: update the driver to 580 or later, or "
                f"{_OTHERWISE}"
            )
        device = check(cu.cuDeviceGet(ordinal), f"opening GPU {ordinal}")
        name = check(cu.cuDeviceGetName(128, device), "reading the name").split(b"\0")[0].decode()
        arch = architecture(ordinal)
        if arch not in ARCHITECTURES:
            raise DeviceError(
                f"GPU {ordinal} ({name}) is {arch}, kernels exist for {', '.join(ARCHITECTURES)}: "
                f"use a Hopper or Blackwell GPU, or {_OTHERWISE}"
            )
        context = check(cu.cuDevicePrimaryCtxRetain(device), f"taking GPU {ordinal}")
        check(cu.cuCtxSetCurrent(context), f"taking GPU {ordinal}")
        _, total = memory()
        attribute = cu.CUdevice_attribute
        l2_bytes = _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        num_sms = _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        return cls(ordinal, name, arch, total, l2_bytes, num_sms, version, context)

    def enter(self) -> None:
        """Make this the GPU that calls of this thread are about, whichever thread that is."""
        check(cu.cuCtxSetCurrent(self.context), f"turning to GPU {self.ordinal}")

    def reach(self, peer: Device) -> None:
        """Let kernels on this GPU, which is the current one, read and write a peer's memory.

        Raises:
            DeviceError: when no link between them allows it.
        """
        if not check(
            cu.cuDeviceCanAccessPeer(self.ordinal, peer.ordinal), "asking about a link of GPUs"
        ):
            raise DeviceError(
                f"GPU {self.ordinal} cannot reach the memory of GPU {peer.ordinal}: choose GPUs "
                f"that NVLink or PCIe peer access joins (nvidia-smi topo -m)"
            )
        result = cu.cuCtxEnablePeerAccess(peer.context, 0)
        if result[0] != cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
            check(result, f"joining GPU {self.ordinal} to GPU {peer.ordinal}")


def memory() -> tuple[int, int]:
    """Free and total bytes of the current GPU."""
    free, total = check(cu.cuMemGetInfo(), "reading the memory size")
    return int(free), int(total)


def _room() -> str:
    free, total = (size / 2**30 for size in memory())
    return f"{free:.2f} of {total:.2f} GiB are free"


def allocate(size: int, what: str) -> Address:
    """Zeroed device memory.

    Raises:
        DeviceError: naming what it was for, its size and what is free.
    """
    result = cu.cuMemAlloc(max(size, 1))
    if result[0] == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        needed = f"{what} needs {size / 2**30:.2f} GiB of GPU memory"
        raise DeviceError(f"{needed}, {_room()}: {_LESS}")
    address = check(result, f"allocating {what}")
    clear(int(address), max(size, 1))
    return int(address)


def upload(address: Address, array: npt.NDArray[Any]) -> None:
    """Copy a host array to the device and wait."""
    data = np.ascontiguousarray(array)
    if data.nbytes:
        check(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes), "copying to the GPU")
        # The call may return before the last bytes are there, and streams of ours do not wait.
        check(cu.cuStreamSynchronize(0), "copying to the GPU", _LOST)


def download(address: Address, array: npt.NDArray[Any]) -> None:
    """Fill a contiguous host array from the device and wait."""
    if array.nbytes:
        check(cu.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes), "copying from the GPU")


def clear(address: Address, size: int) -> None:
    """Zero device memory and wait for it."""
    fill(address, 0, size)


def fill(address: Address, value: int, size: int) -> None:
    """Give bytes one value, and wait for it: our streams do not wait for the default one."""
    check(cu.cuMemsetD8(address, value, size), "filling GPU memory")
    check(cu.cuStreamSynchronize(0), "filling GPU memory", _LOST)


def copy(to: Address, source: Address, size: int) -> None:
    """Copy inside the device and wait."""
    check(cu.cuMemcpyDtoD(to, source, size), "copying GPU memory")
    check(cu.cuStreamSynchronize(0), "copying GPU memory", _LOST)


def release(address: Address) -> None:
    """Give device memory back; waits for work that may use it."""
    check(cu.cuMemFree(address), "releasing GPU memory")


class Pinned:
    """Host memory that the device copies from and to without staging."""

    def __init__(self, size: int) -> None:
        """Allocate zeroed bytes; they live until `close`."""
        self.address: Address = int(check(cu.cuMemAllocHost(max(size, 1)), "pinning host memory"))
        raw = (ctypes.c_uint8 * max(size, 1)).from_address(self.address)
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array(raw)
        self.bytes[:] = 0

    def close(self) -> None:
        """Unpin it; no view may be used afterwards."""
        check(cu.cuMemFreeHost(self.address), "unpinning host memory")

    def view(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A typed window into it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        window: npt.NDArray[Any] = self.bytes[offset : offset + size].view(dtype).reshape(shape)
        return window


class Function:
    """A kernel of a loaded module; `early`: it may start before the work in front of it is done."""

    def __init__(self, cubin: bytes, entry: str) -> None:
        """Load a cubin.

        Raises:
            DeviceError: when the driver refuses it.
        """
        self._module = check(cu.cuModuleLoadData(cubin), f"loading {entry}")
        self.handle = check(
            cu.cuModuleGetFunction(self._module, entry.encode()), f"finding {entry}"
        )
        # The source says so itself (ptx/uf/early.cuh), for it has to do the waiting. Asking the
        # driver for a symbol that most modules lack is an error to whoever watches its calls.
        self.early = b"\0uf_starts_early\0" in cubin
        self._shared = 0

    def allow_shared(self, size: int) -> None:
        """Permit this much dynamic shared memory; without it, it has 48 KiB with the static."""
        if size <= self._shared:
            return
        self._shared = size
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(self.handle, attribute, size), "raising shared memory")


class Stream:
    """A queue of work on the device."""

    def __init__(self, *, overlap: bool = True) -> None:
        """Make one that does not wait for the default stream.

        `overlap`: kernels that can start before those in front of them are done, do.
        """
        self._overlap = overlap
        flag = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = check(cu.cuStreamCreate(flag), "making a stream")
        # perf_counter_ns of the latest graph: queued, and seen to be done. What lies between an end
        # and the next launch is the host's share of a step.
        self.launched_ns = self.ended_ns = 0

    def launch(
        self, f: Function, grid: Sequence[int], block: Sequence[int], shared: int, args: bytes
    ) -> None:
        """Queue a kernel whose one parameter is `args`."""
        buffer = np.frombuffer(args, np.uint8).copy()
        pointers = np.array([buffer.ctypes.data], np.uint64)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared, self.handle
        if f.early and self._overlap:
            attribute = cu.CUlaunchAttribute()
            attribute.id = (
                cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        check(
            cu.cuLaunchKernelEx(config, f.handle, pointers.ctypes.data, 0),
            "launching a kernel",
        )

    def copy_in(self, address: Address, host: Address, size: int) -> None:
        """Queue a copy from pinned memory."""
        check(cu.cuMemcpyHtoDAsync(address, host, size, self.handle), "copying to the GPU")

    def copy_out(self, host: Address, address: Address, size: int) -> None:
        """Queue a copy to pinned memory."""
        check(cu.cuMemcpyDtoHAsync(host, address, size, self.handle), "copying from the GPU")

    def wait_for(self, event: Event) -> None:
        """What is queued from now on begins after `event`, as it was recorded last."""
        check(cu.cuStreamWaitEvent(self.handle, event.handle, 0), "waiting for another stream")

    def wait(self, event: Event | None = None) -> None:
        """Wait until everything queued is done, or what was in front of an event of this stream,
        without holding the interpreter lock.

        The driver spins as long as there are more processors than contexts; asking again and again
        was no faster.
        """
        if event:
            check(cu.cuEventSynchronize(event.handle), "a step", _LOST)
        else:
            check(cu.cuStreamSynchronize(self.handle), "a step", _LOST)
        self.ended_ns = time.perf_counter_ns()


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
        self._stream.launched_ns = time.perf_counter_ns()

    def close(self) -> None:
        """Give its memory back; it must not be running."""
        check(cu.cuGraphExecDestroy(self._exec), "releasing a graph")


class Event:
    """A moment of a stream's work."""

    def __init__(self, *, timing: bool = True, spins: bool = False) -> None:
        """Make one that measures time, or one to wait for: asleep, or in a loop that `spins`."""
        flags = cu.CUevent_flags
        waited = flags.CU_EVENT_DISABLE_TIMING
        asleep = flags.CU_EVENT_DEFAULT if spins else flags.CU_EVENT_BLOCKING_SYNC
        flag = flags.CU_EVENT_DEFAULT if timing else waited | asleep
        self.handle = check(cu.cuEventCreate(flag), "making an event")

    def record(self, stream: Stream) -> None:
        """Happen when everything queued so far is done."""
        check(cu.cuEventRecord(self.handle, stream.handle), "recording an event")

    def wait(self) -> None:
        """Sleep until it has happened, without holding the interpreter lock."""
        check(cu.cuEventSynchronize(self.handle), "a copy", _LOST)

    def record_in_graph(self, stream: Stream) -> None:
        """Become a node of the graph that is being captured: it happens in every replay."""
        flag = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        check(
            cu.cuEventRecordWithFlags(self.handle, stream.handle, flag), "recording an event node"
        )

    def since(self, earlier: Event) -> float:
        """Milliseconds between two events that have happened."""
        return float(check(cu.cuEventElapsedTime(earlier.handle, self.handle), "timing"))


def _start() -> str:
    """What keeps the driver from working, with a remedy; "" when it works."""
    try:
        (error,) = cu.cuInit(0)
    except RuntimeError:  # the bindings find no libcuda
        return "there is no NVIDIA driver (libcuda.so.1): install driver 580 or later"
    if error != cu.CUresult.CUDA_SUCCESS:
        return f"the driver does not start, {_words(error)}: check nvidia-smi"
    return ""


def _attribute(device: Any, attribute: Any) -> int:
    return int(check(cu.cuDeviceGetAttribute(attribute, device), "asking what the GPU has"))


def _words(error: Any) -> str:
    _, name = cu.cuGetErrorName(error)
    _, text = cu.cuGetErrorString(error)
    return f"{name.decode()} ({text.decode()})"
