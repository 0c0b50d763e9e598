"""The device's relayout against its NumPy reference, bit for bit, through the real uploader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.device import REHEARSAL
from helpers.device_ops import Ops
from ultraflash.runtime.weights.layout import Bf16Tiles, Fp8Tiles, Relayout

pytestmark = pytest.mark.gpu

STORED: dict[str, Any] = {"u8": np.uint8, "bf16": np.uint16}
SHAPES = [(16, 32), (1280, 5120), (512, 256), (8, 256), (17, 33), (4, 5120), (100, 95), (5120, 288)]


@pytest.mark.skipif(REHEARSAL, reason="the interpreter has no device memory")
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("layout", [Fp8Tiles, Bf16Tiles])
def test_relayout(ops: Ops, layout: type[Relayout], parts: int, rows: int, columns: int) -> None:
    from ultraflash.runtime.gpu.driver import download, release

    kind = STORED[layout.ELEMENT]
    shape = (parts, rows, columns // layout.PACKED)
    stored = np.random.default_rng(rows).integers(0, np.iinfo(kind).max, shape).astype(kind)
    uploader = ops.uploader  # type: ignore[attr-defined]
    address = uploader.place("a weight under test", list(stored), layout)
    uploader.wait()
    got = np.empty((parts, *layout.laid(rows, columns)), kind)
    download(address, got)
    release(address)
    assert np.array_equal(got, np.stack([layout.reference(part) for part in stored]))
