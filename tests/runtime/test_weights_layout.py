"""Tiles in device memory: what is where, and that nothing is lost, doubled or moved by padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.plan import Life, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.layout import (
    Bf16Tiles,
    Fp8Tiles,
    Relayout,
    check_range,
    layout_of,
    stored_sizes,
)

LAYOUTS: dict[str, Any] = {"u8": np.uint8, "bf16": np.uint16}
SHAPES = [(16, 32), (32, 64), (48, 160), (8, 256), (17, 33), (4, 31), (100, 96)]


@pytest.fixture(params=[Fp8Tiles, Bf16Tiles])
def layout(request: pytest.FixtureRequest) -> type[Relayout]:
    return request.param


def numbered(layout: type[Relayout], rows: int, columns: int) -> np.ndarray:
    """Every element another number, as far as its type goes; none is 0."""
    top = np.iinfo(LAYOUTS[layout.ELEMENT]).max
    return (np.arange(rows * columns) % top + 1).astype(LAYOUTS[layout.ELEMENT]).reshape(rows, -1)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_element_has_one_place(layout: type[Relayout], rows: int, columns: int) -> None:
    x = numbered(layout, rows, columns)
    y = layout.reference(x)
    assert y.shape == layout.laid(rows, columns) == layout.of(rows, columns).y.shape
    assert y.dtype == x.dtype
    assert sorted(y[y > 0].tolist()) == sorted(x.ravel().tolist())
    assert np.count_nonzero(y == 0) == y.size - x.size


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_rows_of_tiles_can_be_laid_out_alone(
    layout: type[Relayout], rows: int, columns: int
) -> None:
    x = numbered(layout, rows, columns)
    parts = [layout.reference(x[a : a + layout.ROWS]) for a in range(0, rows, layout.ROWS)]
    assert np.array_equal(np.concatenate(parts), layout.reference(x))


def operand(lane: int) -> Iterator[tuple[int, int, int]]:
    """(row, place in the lane's operand A of one product, its k) as mma.m16n8k16 has them."""
    for place in range(8):
        register, half = divmod(place, 2)
        yield lane // 4 + 8 * (register % 2), place, 2 * (lane % 4) + half + 8 * (register // 2)


def column(product: int, k: int) -> int:
    """The column whose weight stands at k of a product: a lane of the other operand, which has
    k = 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, gets four neighbours."""
    t, half, upper = k % 8 // 2, k % 2, k // 8
    return 8 * t + 4 * product + 2 * upper + half


def test_bf16_tiles_are_operands_of_two_products() -> None:
    x = numbered(Bf16Tiles, 32, 64)
    y = Bf16Tiles.reference(x).reshape(2, 2, 2, 32, 8)
    for lane in range(32):
        for product in (0, 1):
            for row, place, k in operand(lane):
                assert y[1, 0, product, lane, place] == x[16 + row, column(product, k)]


def test_fp8_tiles_are_the_same_operands_after_masks_and_shifts() -> None:
    """Bytes 0 and 2 of a word are one register, 1 and 3 the next but one."""
    x = (np.random.default_rng(5).integers(0, 256, (32, 64))).astype(np.uint8)
    y = Fp8Tiles.reference(x).reshape(2, 2, 32, 2, 2, 4)
    for lane in range(32):
        for product in (0, 1):
            for row, place, k in operand(lane):
                register, half = divmod(place, 2)
                byte = 2 * half + register // 2
                got = y[1, 1, lane, product, register % 2, byte]
                assert got == x[16 + row, 32 + column(product, k)]


def test_linears_read_tiles_and_nothing_else_does() -> None:
    for model in (Model.from_checkpoint(BUNDLED_CHECKPOINT), release_model()):
        plan = build_decode(Build(model, Capacity(1, 1024), block=5), 4, 1)
        for node in plan.nodes:
            for name, ref in node.op.refs:
                if ref.life is Life.WEIGHT:
                    tiled = layout_of(ref.name, ref.dtype) in (Fp8Tiles, Bf16Tiles)
                    assert tiled == (isinstance(node.op, Linear) and name == "w"), ref


@pytest.mark.parametrize(
    ("ref", "sizes"),
    [
        (Ref("layers.0.attn.wq_a", (1280, 5120), "fp8", Life.WEIGHT), (1280 * 5120, 40 * 160)),
        (Ref("layers.0.attn.wq_a", (40, 288), "fp8", Life.WEIGHT), (48 * 288, 2 * 9)),
        (Ref("head", (129280, 5120), "bf16", Life.WEIGHT), (129280 * 5120 * 2,)),
        (Ref("layers.2.attn.indexer.weights_proj", (4, 5120), "bf16", Life.WEIGHT), (163840,)),
        (Ref("norm", (5120,), "bf16", Life.WEIGHT), (10240,)),
        (Ref("head", (4, 30), "bf16", Life.SCRATCH), (240,)),
        (Ref("experts", (8, 16, 64), "fp4", Life.WEIGHT), (8 * 16 * 32, 8 * 16 * 2)),
    ],
    ids=str,
)
def test_sizes_on_the_device(ref: Ref, sizes: tuple[int, ...]) -> None:
    """Tiles take what the stored form takes, but for padding."""
    assert stored_sizes(ref) == sizes


def test_scales_that_kernels_cannot_multiply_by() -> None:
    """The largest factor is 2^127, the last one of bf16."""
    scales = np.full((2, 3), 134, np.uint8)
    check_range(scales, "wq_a.scale")
    scales[1, 2] = 135
    with pytest.raises(WeightsError, match=r"wq_a.scale holds the scale byte 135, .* up to 134"):
        check_range(scales, "wq_a.scale")
