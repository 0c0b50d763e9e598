"""Number formats and quantisers, bit for bit as model.md section 3.1 defines them.

bf16 values travel as float32 arrays whose low 16 bits are zero. Codes are uint8; E2M1 codes are
packed two to a byte, low nibble = even element. Reductions run in float64 and round once, so that
no result depends on how many rows there are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]

_MANTISSA_ROUND_UP = np.uint32(0x7FFFFF)


def _e4m3_table() -> F32:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3: F32 = _e4m3_table()
E2M1: F32 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E2M1_PAIRS: F32 = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)
# 2^-127 is a float32 subnormal: shifting the byte into the exponent field would give zero for byte
# 0.
E8M0: F32 = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan], np.float32)


def to_bf16(x: F32) -> F32:
    """Round float32 to bf16, nearest even; NaN is not expected."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return rounded.view(np.float32)


def round_bf16(x: F64) -> F32:
    """Round float64 to bf16 once (no detour over float32), nearest even.

    Below 2^-126, where no sum of this model ends but 0, more bits than bf16 has may stay.
    """
    bits = np.ascontiguousarray(x).view(np.uint64)
    rounded = (
        bits + np.uint64((1 << 44) - 1) + ((bits >> np.uint64(45)) & np.uint64(1))
    ) & np.uint64(0xFFFFE00000000000)
    return rounded.view(np.float64).astype(np.float32)


def bf16_bits(x: F32) -> npt.NDArray[np.uint16]:
    """The 16 stored bits of bf16 values."""
    return (np.ascontiguousarray(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def bf16_from_bits(bits: npt.NDArray[np.uint16]) -> F32:
    """bf16 values from their 16 stored bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_encode(x: F32) -> U8:
    """Nearest E4M3 code, ties to even, saturating at 448; the sign of zero is kept."""
    magnitude = np.minimum(np.abs(x), np.float32(448))
    exponent = np.maximum((magnitude.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127, -6)
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)  # 8..16, or 0..8 below 2^-6
    codes: U8 = ((exponent + 6) * 8 + steps + 128 * np.signbit(x)).astype(np.uint8)
    return codes


def e2m1_encode(x: F32) -> U8:
    """Nearest E2M1 code (unpacked), ties to even, saturating at 6; the sign of zero is kept."""
    a = np.abs(x)
    code = (a > 0.25).astype(np.uint8)
    # ">" where a tie goes down to the even code, ">=" where it goes up.
    for reached in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += reached
    return code | (np.signbit(x).astype(np.uint8) << np.uint8(3))


# A bf16 value divided by a power of two is a bf16 value again: one table look-up encodes it.
_ALL_BF16 = bf16_from_bits(np.arange(65536, dtype=np.uint16))
_NOT_NAN = np.where(np.isnan(_ALL_BF16), np.float32(0), _ALL_BF16)
_E4M3_CODE_OF_BF16 = e4m3_encode(_NOT_NAN)
_E4M3_VALUE_OF_BF16 = E4M3[_E4M3_CODE_OF_BF16]


def pack_e2m1(codes: U8) -> U8:
    """[..., K] codes to [..., K/2] bytes, low nibble = even element."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack_e2m1(packed: U8) -> F32:
    """[..., K/2] bytes to [..., K] unscaled values."""
    return E2M1_PAIRS[packed].reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def _groups(x: F32, size: int) -> F32:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _power_of_two_scale(peak: F32) -> npt.NDArray[np.uint32]:
    """`pow2ceil` as an E8M0 byte: the exponent field, plus one unless the mantissa is zero."""
    return (peak.view(np.uint32) + _MANTISSA_ROUND_UP) >> np.uint32(23)


def _q8_scaled(x: F32) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    grouped = _groups(np.ascontiguousarray(x), 32)
    peak = np.maximum(np.abs(grouped).max(axis=-1), np.float32(1e-4)) * np.float32(1 / 448)
    scale = _power_of_two_scale(peak)
    inverse = ((np.uint32(254) - scale) << np.uint32(23)).view(np.float32)
    return (grouped * inverse[..., None]).view(np.uint32) >> np.uint32(16), scale


def q8(x: F32) -> tuple[U8, U8]:
    """Q8 of bf16 values: E4M3 codes [..., K] and E8M0 scale bytes [..., K/32]."""
    index, scale = _q8_scaled(x)
    return _E4M3_CODE_OF_BF16[index].reshape(x.shape), scale.astype(np.uint8)


def fake_q8(x: F32) -> F32:
    """Q8 and back: the exact bf16 values that an FP8 or FP4 linear multiplies. [..., K] -> [...,
    K].
    """
    index, scale = _q8_scaled(x)
    return (
        _E4M3_VALUE_OF_BF16[index] * (scale << np.uint32(23)).view(np.float32)[..., None]
    ).reshape(x.shape)


def q8_decode(codes: U8, scales: U8) -> F32:
    """E4M3 codes [..., K] and E8M0 bytes [..., K/32] to values."""
    return (_groups(E4M3[codes], 32) * E8M0[scales][..., None]).reshape(codes.shape)


def qmx4(x: F32) -> tuple[U8, U8]:
    """QMX4 of bf16 values: packed E2M1 [..., K/2] and E8M0 scale bytes [..., K/32]."""
    grouped = _groups(np.ascontiguousarray(x), 32)
    peak = np.maximum(np.abs(grouped).max(axis=-1), np.float32(6 * 2.0**-126)) * np.float32(1 / 6)
    scale = _power_of_two_scale(peak).astype(np.uint8)
    codes = e2m1_encode(grouped / E8M0[scale][..., None])
    return pack_e2m1(codes.reshape(x.shape)), scale


def qmx4_decode(packed: U8, scales: U8) -> F32:
    """Packed E2M1 [..., K/2] and E8M0 bytes [..., K/32] to values [..., K]."""
    values = unpack_e2m1(packed)
    return (_groups(values, 32) * E8M0[scales][..., None]).reshape(values.shape)


def qnv4(x: F32) -> tuple[U8, U8]:
    """QNV4 of bf16 values: packed E2M1 [..., K/2] and E4M3 scale bytes [..., K/16]."""
    grouped = _groups(np.ascontiguousarray(x), 16)
    peak = np.maximum(np.abs(grouped).max(axis=-1), np.float32(6 * 2.0**-9))
    scale = e4m3_encode(peak / np.float32(6))
    codes = e2m1_encode(grouped / E4M3[scale][..., None])
    return pack_e2m1(codes.reshape(x.shape)), scale


def qnv4_decode(packed: U8, scales: U8) -> F32:
    """Packed E2M1 [..., K/2] and E4M3 bytes [..., K/16] to values [..., K]."""
    values = unpack_e2m1(packed)
    return (_groups(values, 16) * E4M3[scales][..., None]).reshape(values.shape)


def mean_square(x: F32) -> F32:
    """Mean of squares over the last axis, float64 inside, rounded once. [..., K] -> [...]."""
    wide = x.astype(np.float64)
    mean: F32 = (np.einsum("...k,...k->...", wide, wide) / x.shape[-1]).astype(np.float32)
    return mean


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """RN of model.md 3.3: bf16 values out."""
    inverse = np.float32(1) / np.sqrt(mean_square(x) + np.float32(eps))
    return to_bf16(weight * (x * inverse[..., None]))


def sigmoid(x: F32) -> F32:
    """Logistic function in float32: 0 where exp(-x) leaves its range, as on a device."""
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: F32) -> F32:
    """x * sigmoid(x) in float32."""
    return x * sigmoid(x)
