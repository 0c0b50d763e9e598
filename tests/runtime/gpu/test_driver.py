"""What keeps a GPU from being used: one sentence each, with what was needed and what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as real

from helpers.fake_cuda import FakeCuda, Gpu
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu.driver import (
    Device,
    Event,
    Graph,
    Pinned,
    Stream,
    allocate,
    clear,
    copy,
    device_count,
    download,
    memory,
    release,
    upload,
)

ERROR = real.CUresult
GIB = 1 << 30


def sentence(act: Callable[[], object]) -> str:
    with pytest.raises(DeviceError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    assert text[-1] != "."
    return text


def test_a_gpu_says_what_it_is(cuda: FakeCuda) -> None:
    cuda.gpus = Gpu(), Gpu("NVIDIA B300", (10, 3), l2_bytes=1 << 27, num_sms=148)
    assert device_count() == 2
    assert Device.open() == Device(0, "NVIDIA H200", "sm_90a", 1 << 33, 1 << 16, 4, 13000)
    assert Device.open(1).arch == "sm_103a"
    assert (Device.open(1).l2_bytes, Device.open(1).num_sms) == (1 << 27, 148)


def test_no_driver(cuda: FakeCuda) -> None:
    cuda.library = False
    assert device_count() == 0
    assert sentence(Device.open) == (
        "GPU 0 was asked for, but there is no NVIDIA driver (libcuda.so.1): install driver 580 or "
        "later, or run on the CPU with UF_BACKEND=numpy"
    )


def test_a_driver_without_a_gpu(cuda: FakeCuda) -> None:
    cuda.fail["cuInit"] = ERROR.CUDA_ERROR_NO_DEVICE
    assert device_count() == 0
    text = sentence(Device.open)
    assert text.startswith("GPU 0 was asked for, but the driver does not start, CUDA_ERROR_NO_DEV")
    assert "check nvidia-smi" in text


def test_too_few_gpus(cuda: FakeCuda) -> None:
    assert sentence(lambda: Device.open(3)).startswith("GPU 3 was asked for and 1 are there: ")


@pytest.mark.parametrize(("version", "words"), [(12080, "12.8"), (12000, "12.0"), (11040, "11.4")])
def test_a_driver_that_is_too_old(cuda: FakeCuda, version: int, words: str) -> None:
    cuda.version = version
    assert sentence(Device.open).startswith(
        f"the driver supports CUDA {words}, CUDA 13.0 is needed: update the driver to 580 or later"
    )


def test_a_newer_driver_is_fine(cuda: FakeCuda) -> None:
    cuda.version = 13020
    assert Device.open().driver == 13020


def test_an_architecture_without_kernels(cuda: FakeCuda) -> None:
    cuda.gpus = (Gpu("NVIDIA GeForce RTX 4090", (8, 9)),)
    assert sentence(Device.open).startswith(
        "GPU 0 (NVIDIA GeForce RTX 4090) is sm_89a, kernels exist for sm_90a, sm_100a, sm_103a: "
    )


def test_out_of_memory_names_what_it_was_for_and_what_is_free(cuda: FakeCuda) -> None:
    cuda.gpus = (Gpu(total_bytes=8 << 20),)
    held = allocate(6 << 20, "the weights")
    text = sentence(lambda: allocate(5 << 20, "state L0.ring"))
    assert text.startswith(
        f"state L0.ring needs {5 / 1024:.2f} GiB of GPU memory, {2 / 1024:.2f} of {8 / 1024:.2f} "
    )
    assert "lower the context or --max-sequences" in text
    release(held)
    assert allocate(5 << 20, "state L0.ring")


@pytest.mark.parametrize(
    "error", [ERROR.CUDA_ERROR_ILLEGAL_ADDRESS, ERROR.CUDA_ERROR_ECC_UNCORRECTABLE]
)
def test_a_gpu_that_is_lost_while_it_works(cuda: FakeCuda, error: Any) -> None:
    stream = Stream()
    cuda.fail["cuStreamSynchronize"] = error
    text = sentence(stream.wait)
    assert text.startswith(f"a step failed: {error.name} (")
    assert text.endswith("must start again, UF_CHECK=1 would name the node")


@pytest.mark.parametrize(
    ("call", "act"),
    [
        ("cuGraphLaunch", lambda stream, graph: graph.launch()),
        ("cuMemAlloc", lambda stream, graph: allocate(64, "state L0.ring")),
        ("cuMemcpyHtoDAsync", lambda stream, graph: stream.copy_in(0, 0, 8)),
    ],
)
def test_a_lost_gpu_is_said_by_whatever_call_comes_next(
    cuda: FakeCuda, call: str, act: Callable[[Stream, Graph], object]
) -> None:
    """A kernel that fails is found out by any later call, seldom by the one that waits for it."""
    stream = Stream()
    graph = Graph(stream)
    graph.finish()
    cuda.fail[call] = ERROR.CUDA_ERROR_LAUNCH_FAILED
    text = sentence(lambda: act(stream, graph))
    assert "CUDA_ERROR_LAUNCH_FAILED" in text
    assert "this process has lost the GPU and must start again" in text


def test_memory_that_the_driver_itself_lacks(cuda: FakeCuda) -> None:
    cuda.gpus = (Gpu(total_bytes=3 << 30),)
    graph = Graph(Stream())
    cuda.fail["cuGraphInstantiate"] = ERROR.CUDA_ERROR_OUT_OF_MEMORY
    text = sentence(graph.finish)
    assert text.startswith("instantiating a graph failed: CUDA_ERROR_OUT_OF_MEMORY (")
    assert "3.00 of 3.00 GiB are free: lower the context or --max-sequences" in text


def test_an_allocation_that_fails_for_another_reason_is_no_lack_of_memory(cuda: FakeCuda) -> None:
    cuda.fail["cuMemAlloc"] = ERROR.CUDA_ERROR_NOT_PERMITTED
    text = sentence(lambda: allocate(64, "state L0.ring"))
    assert text.startswith("allocating state L0.ring failed: CUDA_ERROR_NOT_PERMITTED")
    assert "GiB" not in text


def test_memory_is_zeroed_copied_and_given_back(cuda: FakeCuda, rng: np.random.Generator) -> None:
    free, total = memory()
    assert free == total
    address = allocate(64, "a test")
    assert memory()[0] == free - 64
    values, back = rng.integers(0, 256, 32, np.uint8), np.zeros(64, np.uint8)
    download(address, back)
    assert not back.any()
    upload(address, values)
    copy(address + 32, address, 32)
    download(address, back)
    np.testing.assert_array_equal(back, np.tile(values, 2))
    clear(address + 8, 8)
    download(address, back)
    assert not back[8:16].any()
    assert (back[32:] == values).all()
    release(address)
    assert memory()[0] == free


def test_an_array_that_is_not_contiguous_arrives_in_order(cuda: FakeCuda) -> None:
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    address, back = allocate(48, "a test"), np.empty((4, 3), np.int32)
    upload(address, values.T)
    download(address, back)
    np.testing.assert_array_equal(back, values.T)


def test_pinned_memory_is_zeroed_and_seen_through_typed_windows(cuda: FakeCuda) -> None:
    pinned = Pinned(64)
    assert not pinned.bytes.any()
    pinned.view(16, (2, 3), np.float32)[1, 2] = 1.0
    assert pinned.view(16 + 4 * 5, (1,), np.uint32)[0] == 0x3F800000
    pinned.close()
    assert cuda.pinned == {}


def test_a_graph_runs_what_was_queued_each_time_it_is_launched(cuda: FakeCuda) -> None:
    stream, pinned, address = Stream(), Pinned(8), allocate(8, "a test")
    graph = Graph(stream)
    stream.copy_in(address, pinned.address, 8)
    graph.finish()
    assert graph.nodes == 1
    back = np.empty(8, np.uint8)
    for value in (3, 5):
        pinned.bytes[:] = value
        graph.launch()
        stream.wait()
        download(address, back)
        assert (back == value).all()
    graph.close()


def test_events_measure_what_lies_between_them(cuda: FakeCuda) -> None:
    stream, before, after = Stream(), Event(), Event()
    before.record(stream)
    after.record(stream)
    assert after.since(before) >= 0
