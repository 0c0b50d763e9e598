"""Random inputs that look like activations and weights: signs, several octaves, zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.formats import (
    E2M1_MAGNITUDES,
    E4M3_MAGNITUDES,
    F32,
    F64,
    U8,
    bf16,
    decode,
    nearest_code,
    quantise,
)

ROWS = (1, 2, 3, 16, 33)  # one, few, odd, the widest decode step, more than that


def activations(rng: np.random.Generator, *shape: int, spread: float = 2.0) -> F32:
    """bf16 values; rows differ by octaves, a tenth of the values is zero or very small."""
    x = rng.normal(size=shape) * 2.0 ** rng.normal(scale=spread, size=(*shape[:-1], 1))
    x *= rng.choice([0.0, 1e-3, 1.0], p=[0.05, 0.05, 0.9], size=shape)
    return bf16(x)


def through_q8(x: F32) -> F32:
    """What a linear with quantised weights sees: exact code * scale values."""
    return quantise("q8", x)[2].astype(np.float32)


def dense_weight(rng: np.random.Generator, *shape: int) -> F64:
    """Values of bf16 weights as exact float64, the host form of a matrix."""
    return bf16(rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float64)


def fp8_weight(rng: np.random.Generator, rows: int, columns: int) -> F64:
    """Values e4m3 * 2^n with one scale a 32x32 block, scales octaves apart."""
    return _scaled(rng, (rows, columns), E4M3_MAGNITUDES, (32, 32))


def fp4_weight(rng: np.random.Generator, *shape: int) -> F64:
    """Values e2m1 * 2^n with one scale for 32 columns of a row."""
    return _scaled(rng, shape, E2M1_MAGNITUDES, (1, 32))


def _scaled(
    rng: np.random.Generator, shape: tuple[int, ...], magnitudes: F64, block: tuple[int, int]
) -> F64:
    largest = magnitudes[-1]
    raw = decode(nearest_code(rng.normal(size=shape) * largest / 4, magnitudes), magnitudes)
    *lead, rows, columns = shape
    blocks = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    exponent = np.round(np.log2(4 / largest * columns**-0.5)) + rng.integers(-3, 3, size=blocks)
    scale = np.repeat(np.repeat(2.0**exponent, block[0], axis=-2), block[1], axis=-1)
    values: F64 = raw * scale[..., :rows, :columns]
    return values


def codes_without_nan(rng: np.random.Generator, *shape: int) -> U8:
    """Arbitrary E4M3 codes, the two NaNs left out."""
    codes = rng.integers(0, 254, size=shape).astype(np.uint8)
    return codes + (codes >= 127).astype(np.uint8)


def angles(rng: np.random.Generator, rows: int, pairs: int) -> tuple[F32, F32]:
    """Cosines and sines of arbitrary angles."""
    turn = rng.uniform(0, 2 * np.pi, size=(rows, pairs))
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def turned(x: npt.NDArray[Any], cos: F32, sin: F32) -> F64:
    """Model.md 3.4 in float64, by complex numbers: the last dims, adjacent pairs."""
    pairs = cos.shape[-1]
    y = x.astype(np.float64)
    tail = y[..., -2 * pairs :]
    between = (1,) * (x.ndim - 2)
    turn = (cos.astype(np.float64) + 1j * sin.astype(np.float64)).reshape(len(x), *between, pairs)
    spun = (tail[..., 0::2] + 1j * tail[..., 1::2]) * turn
    y[..., -2 * pairs :: 2], y[..., 1 - 2 * pairs :: 2] = spun.real, spun.imag
    return y
