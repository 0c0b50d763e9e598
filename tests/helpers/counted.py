"""Random values that are functions of (seed, index): the host makes any element that a device made.

The device's kernels (helpers/device_data.py) compile the very functions that stand here: they take
NumPy arrays on the host and single numbers there. Arithmetic is of integers, or exact up to its
last rounding, so that both agree to the bit. Constants are `np.uint64`: Numba would make floating
point numbers of a u64 and a plain integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
U64 = npt.NDArray[np.uint64]

GROUP_SHIFT = np.uint64(5)  # 32 neighbours share a scale
_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_MIX_AGAIN = np.uint64(0x94D049BB133111EB)
_0, _1, _3, _7, _8 = (np.uint64(n) for n in (0, 1, 3, 7, 8))
_10, _15, _16, _23, _27, _30, _31 = (np.uint64(n) for n in (10, 15, 16, 23, 27, 30, 31))
_4, _32, _40, _48, _127 = (np.uint64(n) for n in (4, 32, 40, 48, 127))
_LOW_BYTE, _LOW_HALF, _ROUND = np.uint64(0xFF), np.uint64(0xFFFF), np.uint64(0x7FFF)
_MIDDLE = np.int64(2 * 65535)  # of the sum of four numbers of 16 bits
_DEVIATION = np.float32(65536 / 3**0.5)  # their standard deviation
_24_BITS = np.float64(2.0**-24)


def seed_of(text: str) -> np.uint64:
    """Another sequence for every text."""
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def bits(seed: Any, index: Any) -> Any:
    """64 random bits: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) at a place of its sequence."""
    z = seed + (index + _1) * _GOLDEN
    z = (z ^ (z >> _30)) * _MIX
    z = (z ^ (z >> _27)) * _MIX_AGAIN
    return z ^ (z >> _31)


def bf16(value: Any) -> Any:
    """float32 to the bits of the nearest bf16, ties to even."""
    raw = np.uint64(np.float32(value).view(np.uint32))
    return np.uint16((raw + _ROUND + ((raw >> _16) & _1)) >> _16)


# --- elements: of own bits, bits shared by 32 neighbours, and two parameters ---


def byte(own: Any, shared: Any, low: Any, count: Any) -> Any:
    """One of `count` bytes from `low` on: FP4 codes (0, 256), E8M0 scales in a range."""
    return np.uint8(low + (((own >> _32) * count) >> _32))


def e4m3(own: Any, shared: Any, low: Any, count: Any) -> Any:
    """Any E4M3 code but the two NaNs."""
    code = own & _LOW_BYTE
    return np.uint8(code - (((code & _127) + _1) >> _7))


def bell(own: Any, shared: Any, low: Any, spread: Any) -> Any:
    """Nearly normal float32 around 0: the sum of four uniform numbers, which is exact."""
    total = (own & _LOW_HALF) + ((own >> _16) & _LOW_HALF) + ((own >> _32) & _LOW_HALF)
    return np.float32(np.int64(total + (own >> _48)) - _MIDDLE) * np.float32(spread / _DEVIATION)


def uniform(own: Any, shared: Any, low: Any, span: Any) -> Any:
    """float32 in [low, low + span]; the product is exact, so that fusing it changes nothing."""
    return np.float32(low + np.float64(own >> _40) * (span * _24_BITS))


def through_q8(own: Any, shared: Any, low: Any, count: Any) -> Any:
    """What a product with quantised weights reads: E4M3 code times one of `count` scales."""
    code = own & _LOW_BYTE
    code = code - (((code & _127) + _1) >> _7)
    exponent = (code >> _3) & _15
    normal = (exponent + _15) >> _4
    scale = low + (((shared >> _32) * count) >> _32)
    power = np.uint32((exponent + (_1 - normal) + scale - _10) << _23).view(np.float32)
    sign = np.float32(1) - np.float32(np.float32(2) * np.float32(code >> _7))
    return sign * (np.float32((code & _7) + _8 * normal) * power)


# --- recipes ---


@dataclass(frozen=True)
class Recipe:
    """How the elements of a buffer are made; `dtype` is what is stored, bf16 as its bits."""

    element: Callable[..., Any]
    dtype: type[np.generic]
    low: np.generic = _0
    span: np.generic = _0
    rounded: bool = False  # to bf16

    def at(self, seed: np.uint64, index: npt.ArrayLike) -> Array:
        """The elements at these places, on the host."""
        places = np.atleast_1d(np.asarray(index, np.uint64))
        own, shared = bits(seed, places), bits(~seed, places >> GROUP_SHIFT)
        values = self.element(own, shared, self.low, self.span)
        made: Array = (bf16(values) if self.rounded else values).astype(self.dtype, copy=False)
        return made


def codes8() -> Recipe:
    """E4M3 codes."""
    return Recipe(e4m3, np.uint8)


def codes4() -> Recipe:
    """Bytes of two E2M1 codes each."""
    return bytes_between(0, 256)


def bytes_between(low: int, end: int) -> Recipe:
    """Bytes in [low, end): scales."""
    return Recipe(byte, np.uint8, np.uint64(low), np.uint64(end - low))


def normal16(spread: float) -> Recipe:
    """bf16 around 0."""
    return Recipe(bell, np.uint16, _0, np.float64(spread), rounded=True)


def normal32(spread: float) -> Recipe:
    """float32 around 0."""
    return Recipe(bell, np.float32, _0, np.float64(spread))


def uniform16(low: float, high: float) -> Recipe:
    """bf16 in [low, high]."""
    return Recipe(uniform, np.uint16, np.float64(low), _span(low, high), rounded=True)


def uniform32(low: float, high: float) -> Recipe:
    """float32 in [low, high]."""
    return Recipe(uniform, np.float32, np.float64(low), _span(low, high))


def _span(low: float, high: float) -> np.float64:
    return np.float64(np.float32(high - low))  # 24 bits, so that 24 more fit into a product


def activations8(low: int, end: int) -> Recipe:
    """bf16 that have been through Q8, with scale bytes in [low, end)."""
    return Recipe(through_q8, np.uint16, np.uint64(low), np.uint64(end - low), rounded=True)


# --- choices: ids of experts, selected entries ---


def choices(seed: np.uint64, rows: int, most: int, count: int) -> npt.NDArray[np.int32]:
    """[rows, most]: different ones of `count`, ascending, all sets alike; -1 where none is left.

    Selection sampling (Knuth, TAOCP 3.4.2, algorithm S), where the device has a thread a row.
    """
    found = np.full((rows, most), -1, np.int32)
    taken = np.zeros(rows, np.int64)
    first = np.arange(rows, dtype=np.uint64) * np.uint64(count)
    wanted = min(most, count)
    for number in range(count):
        left = (bits(seed, first + np.uint64(number)) >> _32) * np.uint64(count - number) >> _32
        hit = np.flatnonzero(left.astype(np.int64) < wanted - taken)
        found[hit, taken[hit]] = number
        taken[hit] += 1
    return found
