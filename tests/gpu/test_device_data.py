"""What is made on the device is what the host says of it, and a check that must fail does."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from helpers import counted
from helpers.counted import Recipe, choices, seed_of
from helpers.device import REHEARSAL
from helpers.device_ops import CudaOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REHEARSAL, reason="this is about kernels"),
]
RECIPES: dict[str, Recipe] = {
    "codes8": counted.codes8(),
    "codes4": counted.codes4(),
    "scales": counted.bytes_between(117, 123),
    "normal16": counted.normal16(1.5),
    "normal32": counted.normal32(0.02),
    "uniform16": counted.uniform16(-2, 3),
    "uniform32": counted.uniform32(0.01, 1.5),
    "activations8": counted.activations8(117, 122),
}


def on_device(ops: CudaOps, shape: tuple[int, ...], dtype: Any, fill: Any) -> Any:
    """What `fill(address)` writes into poisoned memory, and a guard behind it stays as it was."""
    from ultraflash.runtime.gpu.driver import allocate, download, release, upload

    size = prod(shape) * np.dtype(dtype).itemsize
    address = allocate(size + 64, "a test")
    try:
        upload(address, np.full(size + 64, 0xFF, np.uint8))
        fill(address)
        raw = np.empty(size + 64, np.uint8)
        download(address, raw)
    finally:
        release(address)
    assert (raw[size:] == 0xFF).all(), "something was written behind the end"
    return raw[:size].view(dtype).reshape(shape)


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_array_is_the_hosts(ops: CudaOps, name: str) -> None:
    from helpers.device_data import fill

    recipe, seed = RECIPES[name], seed_of(name)
    for count in (1, 31, 100_003):
        got = on_device(ops, (count,), recipe.dtype, lambda at, n=count: fill(at, n, recipe, seed))
        want = recipe.at(seed, np.arange(count))
        assert got.tobytes() == want.tobytes()


def test_elements_beyond_four_thousand_millions(ops: CudaOps) -> None:
    from helpers.device_data import fill
    from ultraflash.runtime.gpu.driver import allocate, download, release

    count, recipe, seed = (1 << 32) + 12345, counted.codes8(), seed_of("far")
    address = allocate(count, "a test")
    try:
        fill(address, count, recipe, seed)
        for start in (0, (1 << 31) - 50, (1 << 32) - 50, count - 100):
            got = np.empty(100, np.uint8)
            download(address + start, got)
            assert (got == recipe.at(seed, start + np.arange(100))).all(), start
    finally:
        release(address)


@pytest.mark.parametrize(
    ("rows", "most", "count"), [(8, 6, 384), (21, 3, 128), (300, 5, 7), (3, 9, 4), (8, 512, 32768)]
)
def test_choices_are_the_hosts(ops: CudaOps, rows: int, most: int, count: int) -> None:
    from helpers.device_data import choose

    seed = seed_of("choices")
    got = on_device(ops, (rows, most), np.int32, lambda at: choose(at, rows, most, count, seed))
    assert (got == choices(seed, rows, most, count)).all()


@pytest.mark.parametrize("dtype", ["fp8", "fp4", "bf16", "f32"])
def test_exact_products_are_the_hosts(ops: CudaOps, dtype: str) -> None:
    """Over a stack of two matrices, in two groups; then with one code changed."""
    from helpers.device_data import fill
    from helpers.device_full import weight_recipes
    from helpers.device_products import exact_product
    from helpers.device_weights import Stored
    from ultraflash.graphs.numerics import bf16_from_bits
    from ultraflash.graphs.plan import Life, Ref
    from ultraflash.runtime.gpu.driver import allocate, release, upload

    stack = 2 if dtype == "fp4" else 1
    shape = (*((2,) if stack == 2 else ()), 64, 96)
    ref, seed = Ref("w", shape, dtype, Life.WEIGHT), seed_of("product")
    x = counted.normal16(1).at(seed, np.arange(6 * 192)).reshape(6, 192)
    which = np.array([0, 1, 1, 0, 1, 0]) % stack
    arrays, held = [], [allocate(x.nbytes, "x")]
    upload(held[0], x)
    for count, recipe in weight_recipes(ref):
        arrays.append(recipe.at(seed, np.arange(count)))
        held.append(allocate(arrays[-1].nbytes, "w"))
        fill(held[-1], count, recipe, seed)
    try:
        found = []
        for first in (arrays[0].view(np.uint8)[:4], arrays[0].view(np.uint8)[:4] ^ 0x22):
            upload(held[1], first)
            at = (held[0], x.shape), dtype, shape, tuple(held[1:])
            found.append(exact_product(*at, which=which, groups=2))
    finally:
        for address in held:
            release(address)
    codes = arrays[0].reshape(*shape[:-1], -1)
    scales = [] if len(arrays) == 1 else [arrays[1].reshape(*shape[:-2], -1, 3)]
    w = Stored(shape, dtype, codes, *scales).values().astype(np.float64).reshape(stack, 64, 96)
    wide = bf16_from_bits(x).astype(np.float64).reshape(6, 2, 96)
    whole, magnitudes = (_by_group(*of) for of in ((wide, w[which]), map(np.abs, (wide, w[which]))))
    np.testing.assert_allclose(found[0][0], whole, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[0][1], magnitudes, rtol=1e-12)
    changed = found[0][0] != found[1][0]
    assert changed[which == 0, 0].all()
    assert not changed[:, 1:].any()


def _by_group(x: Any, w: Any) -> Any:
    """[T, 2, K] activations times [T, 64, K] matrices: each half of the outputs has its part."""
    halves = [np.einsum("tk,tnk->tn", x[:, g], w[:, 32 * g : 32 * g + 32]) for g in (0, 1)]
    return np.concatenate(halves, 1)
