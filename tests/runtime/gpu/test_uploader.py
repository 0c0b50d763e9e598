"""Weights onto the device: every byte in its place, through however many buffers and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from ultraflash.runtime.errors import DeviceError, WeightsError
from ultraflash.runtime.gpu.driver import Device, download
from ultraflash.runtime.gpu.uploader import Uploader
from ultraflash.runtime.weights.formats import check_scales
from ultraflash.runtime.weights.layout import Fp8Tiles

Array = np.ndarray[Any, Any]
LANE = 256


@pytest.fixture(params=[False, True], ids=["at_once", "late"])
def uploader(request: pytest.FixtureRequest, cuda: FakeCuda, tmp_path: Path) -> Uploader:
    cuda.lazy = request.param
    return Uploader(Device.open(), tmp_path, buffers=3, size=LANE)


def held(address: int, like: Array) -> Array:
    found = np.empty_like(like)
    download(address, found)
    return found


def values(rng: np.random.Generator, *shape: int, dtype: Any = np.uint8) -> Array:
    return rng.integers(0, 200, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_arrays_of_all_sizes(uploader: Uploader, rng: np.random.Generator, dtype: Any) -> None:
    """Smaller than a buffer, larger, and many that share one."""
    shapes: list[tuple[int, ...]] = [(), (3,), (64,), (1000,), (16, 16), (50, 33), (0,)]
    cases = [[values(rng, *shape, dtype=dtype)] for shape in shapes]
    cases += [[values(rng, 4, 9, dtype=dtype) for _ in range(40)]]
    with uploader:
        addresses = [uploader.place(f"w{n}", parts) for n, parts in enumerate(cases)]
    for address, parts in zip(addresses, cases, strict=True):
        whole = np.stack(parts)
        np.testing.assert_array_equal(held(address, whole), whole)


def test_what_is_not_contiguous(uploader: Uploader, rng: np.random.Generator) -> None:
    """A rank's columns of a matrix."""
    part = values(rng, 40, 60)[:, 10:30]
    with uploader:
        address = uploader.place("w", [part, part + 1])
    np.testing.assert_array_equal(held(address, np.stack([part] * 2)), np.stack([part, part + 1]))


def test_buffers_are_given_back(cuda: FakeCuda, tmp_path: Path) -> None:
    with Uploader(Device.open(), tmp_path):
        assert cuda.pinned
    assert not cuda.pinned
    assert not cuda.allocated


def test_everything_is_checked_as_it_passes(uploader: Uploader, rng: np.random.Generator) -> None:
    parts = [values(rng, 37, 11) for _ in range(5)]
    seen: dict[tuple[int, int], bytes] = {}

    def check(part: int, first: int, rows: Array) -> None:
        for number, row in enumerate(rows, first):
            assert (part, number) not in seen
            seen[part, number] = row.tobytes()

    with uploader:
        uploader.place("w", parts, None, check)
    assert seen == {(p, n): row.tobytes() for p, part in enumerate(parts)
                    for n, row in enumerate(part)}  # fmt: skip


def test_damage_is_named_where_it_is(uploader: Uploader) -> None:
    """By the weight's part and row, though it is found in a buffer."""
    parts = [np.zeros((90, 8), np.uint8) for _ in range(3)]
    parts[1][77, 5] = 255
    names = ["a.scale", "b.scale", "c.scale"]

    def check(part: int, first: int, rows: Array) -> None:
        check_scales(rows, names[part], (first, 0))

    def act() -> None:
        with uploader:
            uploader.place("w", parts, None, check)

    with pytest.raises(WeightsError, match=r"b.scale holds the NaN scale byte 255 at \[77, 5\]"):
        act()


def test_a_failed_copy_is_told_and_the_buffers_go(cuda: FakeCuda, tmp_path: Path) -> None:
    uploader = Uploader(Device.open(), tmp_path, buffers=3, size=LANE)
    cuda.fail["cuMemcpyHtoDAsync"] = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    def act() -> None:
        with uploader:
            for number in range(20):
                uploader.place(f"w{number}", [np.zeros(100, np.uint8)])

    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        act()
    assert not cuda.pinned


def test_an_error_of_the_caller_is_not_hidden(cuda: FakeCuda, tmp_path: Path) -> None:
    uploader = Uploader(Device.open(), tmp_path, buffers=3, size=LANE)
    cuda.fail["cuMemcpyHtoDAsync"] = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    def act() -> None:
        with uploader:
            uploader.place("w", [np.zeros(100, np.uint8)])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        act()


@pytest.mark.parametrize("layout", [None, Fp8Tiles])
def test_rows_that_no_buffer_holds(uploader: Uploader, layout: Any) -> None:
    row = LANE + 1 if layout is None else LANE // 16 + 1
    with uploader, pytest.raises(DeviceError, match=f"rows of {row} bytes.*larger buffers"):
        uploader.place("w", [np.zeros((2, row), np.uint8)], layout)


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
def test_rows_of_tiles_travel_together(cuda: FakeCuda, kernel_cache: Path) -> None:
    """40 rows of 64 bytes through buffers of 1,100: 16 at a time, so three pieces each; where no
    rows are padded, matrices share a buffer."""
    for rows, pieces in ((40, 6), (16, 2), (8, 2)):
        with Uploader(Device.open(), kernel_cache, buffers=2, size=1100) as uploader:
            uploader.place("wq_a", [np.zeros((rows, 64), np.uint8)] * 2, Fp8Tiles)
        assert [launch[0] for launch in cuda.launches] == ["uf_tiles"] * pieces
        cuda.launches.clear()
    with Uploader(Device.open(), kernel_cache, buffers=2, size=2048) as uploader:
        uploader.place("wq_a", [np.zeros((16, 64), np.uint8)] * 2, Fp8Tiles)
    assert len(cuda.launches) == 1


def test_threads_fill_buffers_side_by_side(cuda: FakeCuda, tmp_path: Path) -> None:
    """As many at a time as there are buffers: here each waits for all the others."""
    together = threading.Barrier(3, timeout=20)
    meet: Callable[..., Any] = lambda part, first, rows: together.wait()  # noqa: E731
    with Uploader(Device.open(), tmp_path, buffers=3, size=LANE) as uploader:
        uploader.place("w", [np.zeros(3 * LANE, np.uint8)], None, meet)
