"""Weights made on the device: the bytes that the NumPy form says, tables that repeat a part."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

from ultraflash.graphs.numerics import bf16_bits, to_bf16
from ultraflash.graphs.plan import Life, Ref
from ultraflash.runtime.weights.layout import stored_sizes
from ultraflash.runtime.weights.synthetic import Codes, Normal, weight_contents

pytestmark = pytest.mark.gpu
ODD = 5_003  # no multiple of what a thread fills


def weight(name: str, shape: tuple[int, ...], dtype: str) -> Ref:
    return Ref(name, shape, dtype, Life.WEIGHT)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fills")


@pytest.mark.parametrize(
    "ref",
    [
        weight("layers.3.ffn.experts.w1", (3, 32, ODD // 32 * 32), "fp4"),
        weight("layers.3.attn.wq_a", (96, 160), "fp8"),
        weight("layers.1.engram.embed", (ODD, 32), "rows8"),
        weight("embed", (7, ODD), "bf16"),
        weight("layers.0.hc_attn_fn", (24, ODD), "f32"),
    ],
    ids=lambda ref: ref.name,
)
def test_the_device_makes_what_numpy_makes(ref: Ref, cache: Path) -> None:
    from ultraflash.runtime.gpu.driver import Device, allocate, download, release
    from ultraflash.runtime.gpu.fill import Filler

    filler = Filler(Device.open(), cache)
    for content, size in zip(weight_contents(ref, rank=2), stored_sizes(ref), strict=True):
        count = size if isinstance(content, Codes) else prod(ref.shape)
        address = allocate(size + 64, str(ref))
        filler.fill(address, count, "u8" if isinstance(content, Codes) else ref.dtype, content)
        filler.wait()
        found = np.empty(size + 64, np.uint8)
        download(address, found)
        release(address)
        assert not found[size:].any(), "it writes beyond the end"
        if isinstance(content, Codes):
            assert np.array_equal(found[:size], content.bytes(count))
        else:
            close(found[:size], content, count, ref.dtype)


def close(found: np.ndarray, content: Normal, count: int, dtype: str) -> None:
    """Logarithms and cosines differ in their last bits."""
    wanted = content.values(count)
    if dtype == "f32":
        off = np.abs(found.view(np.float32) - wanted)
        assert off.max() <= 1e-5 * content.deviation
    else:
        off = np.abs(found.view(np.uint16).astype(int) - bf16_bits(to_bf16(wanted)).astype(int))
        assert np.quantile(off, 0.99) <= 1


def test_a_large_table_repeats_the_part_that_is_there() -> None:
    from ultraflash.runtime.gpu.driver import Device, download, memory, upload
    from ultraflash.runtime.gpu.synthetic import _repeated

    device, part = Device.open(), 4 << 20
    free = memory()[0]
    at = _repeated(9 * part - 100, part, "a table", device)
    assert free - memory()[0] <= 2 * part
    mark = np.arange(256, dtype=np.uint8)
    upload(at + 3 * part + 4096, mark)
    for number in range(9):
        found = np.empty_like(mark)
        download(at + number * part + 4096, found)
        assert np.array_equal(found, mark)
