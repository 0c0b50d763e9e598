"""The storage formats of the checkpoint, decoded exactly; and encoded, for tools that write one.

Formats: `bf16`, `f32`; `fp8` = E4M3 with one E8M0 scale for each 32 x 32 square; `fp4` = packed
E2M1 with one for each run of 32; `rows8` = E4M3 with one for each run of 32 (Engram tables).

Shapes: codes [..., N, K] (fp4: [..., N, K/2], low nibble = even k); scales as stored.
Source: model.md section 2.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.numerics import (
    E4M3,
    E8M0,
    F32,
    U8,
    bf16_from_bits,
    e2m1_encode,
    e4m3_encode,
    pack_e2m1,
    unpack_e2m1,
)
from ultraflash.runtime.errors import WeightsError

BLOCK = 32
NAN_SCALE = 255

_E4M3_MAX = np.float32(448)
_E2M1_MAX = np.float32(6)


def dequantise(
    format: str, codes: npt.NDArray[Any], scales: U8 | None = None, name: str = "tensor"
) -> F32:
    """The exact float32 values of one stored matrix or vector.

    Raises:
        WeightsError: for a NaN scale byte or a value that is no number, naming `name` and index.
    """
    if format == "bf16":
        values = bf16_from_bits(codes)
    elif format == "f32":
        values = np.array(codes, np.float32)
    elif scales is None:
        raise WeightsError(f"{name} is stored as {format} but comes without scales")
    elif format == "fp8":
        values = decode_e4m3(codes)
        values *= _spread(decode_e8m0(scales, name), codes.shape)
    elif format in ("fp4", "rows8"):
        values = decode_e2m1(codes) if format == "fp4" else decode_e4m3(codes)
        runs = values.reshape(*values.shape[:-1], -1, BLOCK)
        runs *= decode_e8m0(scales, name)[..., None]
    else:
        raise WeightsError(f"{name} has the unknown storage format {format!r}")
    if not np.isfinite(values).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise WeightsError(
            f"{name} holds {values[at]} at {list(at)}, weights must be finite: "
            f"fetch this shard again"
        )
    return values


def decode_e4m3(codes: U8) -> F32:
    """E4M3 codes to unscaled values; 127 and 255 are NaN."""
    return E4M3[codes]


def decode_e2m1(packed: U8) -> F32:
    """Packed E2M1 [..., K/2] to unscaled values [..., K]."""
    return unpack_e2m1(packed)


def decode_e8m0(scales: U8, name: str = "tensor") -> F32:
    """E8M0 bytes to powers of two.

    Raises:
        WeightsError: for byte 255, which means NaN, naming `name` and index.
    """
    check_scales(scales, name)
    return E8M0[scales]


def check_scales(scales: U8, name: str, first: tuple[int, ...] = (0, 0)) -> None:
    """Refuse NaN scale bytes; `first` is where these begin in the tensor of that name.

    Raises:
        WeightsError: naming the tensor, where the first one is, and how many there are.
    """
    # A full scan that allocates nothing: these arrays have billions of bytes in Engram tables.
    if scales.size and scales.max() == NAN_SCALE:
        bad = np.argwhere(scales == NAN_SCALE)
        at = [int(i) + start for i, start in zip(bad[0], first, strict=True)]
        raise WeightsError(
            f"{name} holds the NaN scale byte {NAN_SCALE} at {at} ({len(bad)} in all), the limit "
            f"is {NAN_SCALE - 1}: the file is damaged, fetch this shard again"
        )


def encode_fp8(values: F32) -> tuple[U8, U8]:
    """E4M3 codes [N, K] and E8M0 bytes [ceil(N/32), ceil(K/32)] nearest to `values` [N, K]."""
    rows, columns = (-(-n // BLOCK) for n in values.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    scales = _scale_bytes(padded.reshape(rows, BLOCK, columns, BLOCK).max(axis=(1, 3)), _E4M3_MAX)
    return e4m3_encode(values / _spread(E8M0[scales], values.shape)), scales


def encode_rows8(values: F32) -> tuple[U8, U8]:
    """E4M3 codes [R, K] and E8M0 bytes [R, K/32] nearest to `values` [R, K]."""
    runs = values.reshape(*values.shape[:-1], -1, BLOCK)
    scales = _scale_bytes(np.abs(runs).max(axis=-1), _E4M3_MAX)
    return e4m3_encode(runs / E8M0[scales][..., None]).reshape(values.shape), scales


def encode_fp4(values: F32) -> tuple[U8, U8]:
    """Packed E2M1 [N, K/2] and E8M0 bytes [N, K/32] nearest to `values` [N, K]."""
    runs = values.reshape(*values.shape[:-1], -1, BLOCK)
    scales = _scale_bytes(np.abs(runs).max(axis=-1), _E2M1_MAX)
    return pack_e2m1(e2m1_encode(runs / E8M0[scales][..., None]).reshape(values.shape)), scales


def _scale_bytes(peak: F32, largest: np.float32) -> U8:
    """The smallest power of two by which `peak` fits below `largest`, as E8M0 bytes."""
    mantissa, exponent = np.frexp(np.maximum(peak, np.float32(2.0**-100)) / largest)
    scales: U8 = (exponent - (mantissa == np.float32(0.5)) + 127).astype(np.uint8)
    return scales


def _spread(scales: F32, shape: tuple[int, ...]) -> F32:
    """One scale for each element of a matrix made of 32 x 32 squares; the last ones may be cut."""
    rows: F32 = scales.repeat(BLOCK, axis=0)[: shape[0]]
    return rows.repeat(BLOCK, axis=1)[:, : shape[1]]
