"""Random contents made on the device: of any size, without anything being uploaded.

Needs numba-cuda. The functions of helpers/counted.py are compiled as they stand, so the host can
make any element again. Whatever is filled here is finished when the call returns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from numba import cuda

from helpers import counted
from helpers.counted import GROUP_SHIFT, Recipe

vars(np).setdefault("row_stack", np.vstack)  # gone in NumPy 2.5, numba-cuda 0.30 looks for it
numba.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a row a thread is meant
THREADS, MOST_BLOCKS = 256, 132 * 32

_bits = cuda.jit(counted.bits, device=True)
_bf16 = cuda.jit(counted.bf16, device=True)
_32 = np.uint64(32)


class Window:
    """Device memory that another part of the process allocated, as Numba takes it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "data": (address, False),
            "version": 3,
        }


def window(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array over device memory that somebody else owns, in the current context."""
    return cuda.as_cuda_array(Window(address, shape, dtype))


@cache
def _filler(element: Any, rounded: bool) -> Any:
    made = cuda.jit(element, device=True)

    if rounded:

        @cuda.jit
        def fill(out, seed, low, span):  # type: ignore[no-untyped-def]
            for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
                at = np.uint64(i)
                shared = _bits(~seed, at >> GROUP_SHIFT)
                out[i] = _bf16(made(_bits(seed, at), shared, low, span))

    else:

        @cuda.jit
        def fill(out, seed, low, span):  # type: ignore[no-untyped-def]
            for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
                at = np.uint64(i)
                shared = _bits(~seed, at >> GROUP_SHIFT)
                out[i] = made(_bits(seed, at), shared, low, span)

    return fill


def fill(address: int, count: int, recipe: Recipe, seed: np.uint64) -> None:
    """Put `count` elements of a recipe at an address."""
    blocks = max(1, min(-(-count // THREADS), MOST_BLOCKS))
    out = window(address, (count,), recipe.dtype)
    _filler(recipe.element, recipe.rounded)[blocks, THREADS](out, seed, recipe.low, recipe.span)
    cuda.synchronize()


@cuda.jit
def _choose(out, seed, count):  # type: ignore[no-untyped-def]
    row = cuda.grid(1)
    if row >= out.shape[0]:
        return
    most, taken = min(out.shape[1], count), 0
    for number in range(count):
        if taken == most:
            break
        at = np.uint64(row) * np.uint64(count) + np.uint64(number)
        left = ((_bits(seed, at) >> _32) * np.uint64(count - number)) >> _32
        if np.int64(left) < most - taken:
            out[row, taken] = number
            taken += 1
    for place in range(taken, out.shape[1]):
        out[row, place] = -1


def choose(address: int, rows: int, most: int, count: int, seed: np.uint64) -> None:
    """Put `counted.choices` [rows, most] i32 at an address."""
    out = window(address, (rows, most), np.int32)
    _choose[-(-rows // THREADS), THREADS](out, seed, np.int64(count))
    cuda.synchronize()
