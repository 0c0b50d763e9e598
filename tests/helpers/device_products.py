"""Products recomputed on the device in float64, plainly, from the bytes that a kernel was given.

Shares no code with kernels or with graphs/numerics.py: values of codes are tables made from
helpers/formats.py. Needs numba-cuda.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda, float64

from helpers.device_data import window
from helpers.formats import E2M1_MAGNITUDES, E4M3_MAGNITUDES, decode

F64 = npt.NDArray[np.float64]
THREADS = 128
_STORED = {"fp8": np.uint8, "fp4": np.uint8, "bf16": np.uint16, "f32": np.float32}


@cache
def _values(dtype: str) -> Any:
    """The value of every code, on the device."""
    if dtype == "fp4":
        return cuda.to_device(decode(np.arange(16), E2M1_MAGNITUDES))
    nan = [*E4M3_MAGNITUDES, np.nan]
    return cuda.to_device(np.array([*nan, *np.negative(nan)]))


@cuda.jit(device=True)
def _bf16(raw):  # type: ignore[no-untyped-def]
    return float64(np.uint32(np.uint32(raw) << 16).view(np.float32))


@cuda.jit(device=True)
def _power(scale):  # type: ignore[no-untyped-def]
    return 2.0 ** (float64(scale) - 127.0)


@cuda.jit(device=True)
def _fp8(codes, scales, values, row, k, size):  # type: ignore[no-untyped-def]
    return values[codes[row * size + k]] * _power(
        scales[(row // 32) * ((size + 31) // 32) + k // 32]
    )


@cuda.jit(device=True)
def _fp4(codes, scales, values, row, k, size):  # type: ignore[no-untyped-def]
    code = (codes[(row * size + k) // 2] >> (4 * (k % 2))) & 15
    return values[code] * _power(scales[row * (size // 32) + k // 32])


@cuda.jit(device=True)
def _wide(codes, scales, values, row, k, size):  # type: ignore[no-untyped-def]
    return _bf16(codes[row * size + k])


@cuda.jit(device=True)
def _plain(codes, scales, values, row, k, size):  # type: ignore[no-untyped-def]
    return float64(codes[row * size + k])


_WEIGHT = {"fp8": _fp8, "fp4": _fp4, "bf16": _wide, "f32": _plain}


@cache
def _kernel(dtype: str) -> Any:
    weight = _WEIGHT[dtype]

    @cuda.jit
    def product(x, codes, scales, values, which, groups, sharing, size, out):  # type: ignore[no-untyped-def]
        """A CTA a column of an item; `which` matrix it is, `sharing` items read a row of x."""
        column, item, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        columns = out.shape[2]
        row = which[item] * columns + column
        first = (column // (columns // groups)) * size
        total, scale = 0.0, 0.0
        for k in range(lane, size, THREADS):
            term = weight(codes, scales, values, row, k, size) * _bf16(
                x[item // sharing, first + k]
            )
            total += term
            scale += abs(term)
        sums = cuda.shared.array((2, THREADS), float64)
        sums[0, lane], sums[1, lane] = total, scale
        cuda.syncthreads()
        if lane < 2:
            whole = 0.0
            for other in range(THREADS):
                whole += sums[lane, other]
            out[lane, item, column] = whole

    return product


def exact_product(
    x: tuple[int, tuple[int, int]],
    dtype: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    *,
    which: npt.ArrayLike | None = None,
    groups: int = 1,
) -> tuple[F64, F64]:
    """sum(x w) and sum|x w| of every output, in float64: two arrays [items, N].

    Args:
        x: address and shape [rows, groups*K] of bf16 activations.
        dtype: of the weight, the plan's word.
        shape: of the weight, [..., N, K].
        weight: addresses of its codes and scales, as a checkpoint stores them.
        which: [items] matrix of a stack that an item is multiplied with; None: one, a row an item.
            Several items in a row may share a row of x.
        groups: parts of x that have their own outputs.
    """
    address, (rows, width) = x
    chosen = np.zeros(rows, np.int64) if which is None else np.asarray(which, np.int64).reshape(-1)
    columns, size = shape[-2:]
    stored = prod(shape) // (2 if dtype == "fp4" else 1)
    codes = window(weight[0], (stored,), _STORED[dtype])
    scales = window(weight[1], (prod(_scales(dtype, shape)),), np.uint8) if weight[1:] else codes
    out = cuda.device_array((2, len(chosen), columns), np.float64)
    _kernel(dtype)[(columns, len(chosen)), THREADS](
        window(address, (rows, width), np.uint16), codes, scales, _values(dtype),
        cuda.to_device(chosen), groups, len(chosen) // rows, size, out,
    )  # fmt: skip
    total, scale = out.copy_to_host()
    return total, scale


def _scales(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    step = 32 if dtype == "fp8" else 1
    return (*shape[:-2], -(-shape[-2] // step), -(-shape[-1] // 32))
