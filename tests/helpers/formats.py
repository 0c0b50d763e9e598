"""Number formats from their definitions (model.md 2.1, 3.1): searches over values, no bit tricks.

What graphs/numerics.py and the operations are compared with; it shares no code with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

# Magnitudes in the order of their codes; code 127 of E4M3 is NaN and no magnitude.
E4M3_MAGNITUDES = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def ulp(x: npt.ArrayLike, digits: int, lowest: int) -> F64:
    """Distance of neighbours around x; `digits` significant bits, smallest normal 2^lowest."""
    _, exponent = np.frexp(np.abs(np.asarray(x, np.float64)))
    unit: F64 = np.ldexp(1.0, np.maximum(exponent - 1, lowest) - (digits - 1))
    return unit


def bf16_ulp(x: npt.ArrayLike) -> F64:
    return ulp(x, 8, -126)


def f32_ulp(x: npt.ArrayLike) -> F64:
    return ulp(x, 24, -126)


def bf16(x: npt.ArrayLike) -> F32:
    """The nearest bf16 value of a float64, ties to even, as float32."""
    wide = np.asarray(x, np.float64)
    unit = bf16_ulp(wide)
    with np.errstate(over="ignore"):  # beyond the largest bf16 is infinity
        return np.asarray(np.rint(wide / unit) * unit).astype(np.float32)


def nearest_code(x: npt.ArrayLike, magnitudes: F64) -> U8:
    """Nearest magnitude's code (ties to the even one, saturating), the sign in the bit above."""
    wide = np.asarray(x, np.float64)
    distance = np.abs(np.minimum(np.abs(wide), magnitudes[-1])[..., None] - magnitudes)
    lower = distance.argmin(axis=-1)
    upper = np.minimum(lower + 1, len(magnitudes) - 1)
    tie = np.take_along_axis(distance, upper[..., None], -1)[..., 0] == distance.min(axis=-1)
    code = np.where(tie & (lower % 2 == 1), upper, lower)
    sign = 128 if len(magnitudes) > 8 else 8
    signed: U8 = (code + sign * np.signbit(wide)).astype(np.uint8)
    return signed


def decode(codes: npt.NDArray[Any], magnitudes: F64) -> F64:
    """Values of unpacked codes."""
    sign = 128 if len(magnitudes) > 8 else 8
    value = magnitudes[codes % sign]
    signed: F64 = np.where(codes >= sign, -value, value)
    return signed


def power_of_two_above(t: F32) -> npt.NDArray[np.intp]:
    """n of the smallest 2^n >= t, t a normal float32."""
    mantissa, exponent = np.frexp(t.astype(np.float64))
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def nibbles(packed: U8) -> U8:
    """Two codes a byte, the low one first."""
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(*packed.shape[:-1], -1)


def quantise(kind: str, x: F32) -> tuple[U8, U8, F64]:
    """`q8`, `qmx4` or `qnv4` of bf16 values: unpacked codes, scale bytes, exact values."""
    group = 16 if kind == "qnv4" else 32
    grouped = x.reshape(*x.shape[:-1], -1, group)
    peak = np.abs(grouped).max(axis=-1)
    if kind == "qnv4":
        ratio = np.maximum(peak, np.float32(6 * 2.0**-9)) / np.float32(6)
        scale_byte = nearest_code(ratio, E4M3_MAGNITUDES)
        scale = decode(scale_byte, E4M3_MAGNITUDES)
    else:
        floor, part = (1e-4, 1 / 448) if kind == "q8" else (6 * 2.0**-126, 1 / 6)
        exponent = power_of_two_above(np.maximum(peak, np.float32(floor)) * np.float32(part))
        scale_byte, scale = (exponent + 127).astype(np.uint8), np.ldexp(1.0, exponent)
    magnitudes = E4M3_MAGNITUDES if kind == "q8" else E2M1_MAGNITUDES
    codes = nearest_code(grouped.astype(np.float64) / scale[..., None], magnitudes)
    values = decode(codes, magnitudes) * scale[..., None]
    return codes.reshape(x.shape), scale_byte, values.reshape(x.shape)


def dequantise(kind: str, codes: U8, scales: U8) -> F64:
    """Exact values of stored codes (packed if FP4) and scale bytes."""
    unpacked = codes if kind == "q8" else nibbles(codes)
    magnitudes = E4M3_MAGNITUDES if kind == "q8" else E2M1_MAGNITUDES
    group = 16 if kind == "qnv4" else 32
    scale = (
        decode(scales, E4M3_MAGNITUDES)
        if kind == "qnv4"
        else np.ldexp(1.0, scales.astype(np.int64) - 127)
    )
    values: F64 = decode(unpacked, magnitudes) * np.repeat(scale, group, axis=-1)
    return values
