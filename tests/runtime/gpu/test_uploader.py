"""Weights through small buffers: whole, in order, and rows that belong together in one piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu.driver import Device, download
from ultraflash.runtime.gpu.uploader import Uploader
from ultraflash.runtime.weights.layout import Fp8Tiles


def test_parts_stand_one_behind_the_other(cuda: FakeCuda, tmp_path: Path) -> None:
    Device.open()
    parts = list(np.arange(3 * 50, dtype=np.uint16).reshape(3, 10, 5))
    with Uploader("sm_90a", tmp_path, buffers=2, size=32) as uploader:
        address = uploader.place("experts", parts)
    got = np.empty((3, 10, 5), np.uint16)
    download(address, got)
    np.testing.assert_array_equal(got, np.stack(parts))


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
def test_rows_of_tiles_travel_together(cuda: FakeCuda, tmp_path: Path) -> None:
    """40 rows of 64 bytes through buffers of 1,100: 16 at a time, so three pieces each."""
    Device.open()
    parts = [np.zeros((40, 64), np.uint8)] * 2
    with Uploader("sm_90a", tmp_path, size=1100) as uploader:
        uploader.place("wq_a", parts, Fp8Tiles)
    assert [launch[0] for launch in cuda.launches] == ["uf_tiles"] * 6
    assert sum(int(raw.nbytes) == 2 * 48 * 64 for raw in cuda.allocated.values()) == 1


def test_buffers_too_small_for_a_row_of_tiles(cuda: FakeCuda, tmp_path: Path) -> None:
    Device.open()
    with (
        Uploader("sm_90a", tmp_path, size=512) as uploader,
        pytest.raises(DeviceError, match="weight wq_a has rows of 64 bytes, 16 of which"),
    ):
        uploader.place("wq_a", [np.zeros((16, 64), np.uint8)], Fp8Tiles)
