"""Random plausible weights for single operations, as a checkpoint stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.values import codes_without_nan
from ultraflash.graphs.numerics import (
    E4M3,
    E8M0,
    bf16_bits,
    bf16_from_bits,
    to_bf16,
    unpack_e2m1,
)
from ultraflash.graphs.plan import Op, Ref
from ultraflash.runtime.weights.load import MappedRows

Array = npt.NDArray[Any]

PERIOD = 1_048_573  # larger random arrays repeat this many values: a prime, so rows still differ
TABLE_ROWS, EXPERTS = 5003, 8  # what of huge weights is kept
ALPHABET = 99_092  # compressed ids
# Fields that a reference sees as a float64 matrix, or looks rows up in.
_WIDE = {"Linear.w", "HcMix.fn", "Confidence.w"}
_WIDE |= {"ExpertsUp.w1", "ExpertsUp.w3", "ExpertsDown.w2"}
_LOOKED_UP = {"Embed.table", "MarkovEmbed.table"}


@dataclass(frozen=True)
class Stored:
    """A weight as the checkpoint stores it: `dtype` is the plan's word, `shape` logical."""

    shape: tuple[int, ...]
    dtype: str
    codes: Array
    scales: Array | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def values(self, rows: Array | None = None) -> Array:
        """float32, exact; only `rows` of the axis before the last, if given."""
        codes = self.codes if rows is None else self.codes[..., rows, :]
        if self.dtype == "bf16":
            return bf16_from_bits(codes)
        if self.scales is None:
            return codes
        if self.dtype == "fp8":
            at = np.arange(self.shape[-2]) if rows is None else rows
            scale = E8M0[self.scales[..., at // 32, :]]
            return E4M3[codes] * scale.repeat(32, axis=-1)[..., : self.shape[-1]]
        scale = E8M0[self.scales if rows is None else self.scales[..., rows, :]]
        values = unpack_e2m1(codes) if self.dtype == "fp4" else E4M3[codes]
        return values * scale.repeat(32, axis=-1)


@dataclass(frozen=True)
class Lookup:
    """A table of which a reference only takes rows."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def __getitem__(self, rows: Array) -> Array:
        return Stored(self.shape, self.stored.dtype, self.stored.codes[rows]).values()


def reference_form(op: Op, field: str, stored: Stored, rows: Array | None = None) -> Any:
    """What `op.reference` gets for a weight; `rows` of its outputs if given."""
    name = f"{type(op).__name__}.{field}"
    if stored.dtype == "rows8":
        return MappedRows(stored.codes, stored.scales)  # type: ignore[arg-type]
    if name in _LOOKED_UP:
        return Lookup(stored)
    values = stored.values(rows)
    return values.astype(np.float64) if name in _WIDE else values


class Shelf:
    """Weights by what they are: the same operation and shape gets the same weight again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, tuple[int, ...], str], Stored] = {}

    def weight(self, op: Op, field: str, ref: Ref) -> Stored:
        key = type(op).__name__, field, ref.shape, ref.dtype
        if key not in self._kept:
            seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
            self._kept[key] = _weight(np.random.default_rng(seed), op, field, ref)
        return self._kept[key]


def tiled(shape: tuple[int, ...], make: Callable[[int], Array]) -> Array:
    """`make(count)` random values in this shape; a large array repeats a prime number of them."""
    size = prod(shape)
    return make(size).reshape(shape) if size <= PERIOD else np.resize(make(PERIOD), shape)


def _weight(rng: np.random.Generator, op: Op, field: str, ref: Ref) -> Stored:
    shape, fan = ref.shape, ref.shape[-1]

    def scales(form: tuple[int, ...], rms: float) -> Array:
        middle = 127 - round(log2(rms * fan**0.5))
        return tiled(form, lambda n: rng.integers(middle - 3, middle + 3, n).astype(np.uint8))

    if ref.dtype == "fp8":
        codes = tiled(shape, lambda n: codes_without_nan(rng, n))
        blocks = (*shape[:-2], -(-shape[-2] // 32), -(-fan // 32))
        return Stored(shape, "fp8", codes, scales(blocks, 150))
    if ref.dtype == "fp4":
        packed = (*shape[:-1], fan // 2)
        codes = tiled(packed, lambda n: rng.integers(0, 256, n).astype(np.uint8))
        return Stored(shape, "fp4", codes, scales((*shape[:-1], fan // 32), 3))
    if ref.dtype == "rows8":
        codes = tiled(shape, lambda n: codes_without_nan(rng, n))
        bytes_ = rng.integers(117, 123, (shape[0], fan // 32)).astype(np.uint8)
        return Stored(shape, "rows8", codes, bytes_)
    return Stored(shape, ref.dtype, _plain_weight(rng, op, field, ref))


def _plain_weight(rng: np.random.Generator, op: Op, field: str, ref: Ref) -> Array:
    name, shape = f"{type(op).__name__}.{field}", ref.shape
    if field == "token_map":
        return rng.integers(0, min(shape[0], ALPHABET), shape)
    if field == "multipliers":
        return 2 * rng.integers(0, (2**63 - 1) // ALPHABET // 2, shape) + 1
    if field in ("primes", "offsets"):
        primes = 2 * np.random.default_rng(3).integers(7_500_000, 8_000_000, shape) + 1
        return primes if field == "primes" else np.cumsum(primes) - primes
    if field == "freq":
        return (10000.0 ** -(np.arange(shape[0]) / shape[0])).astype(np.float32)
    wide = {"RmsNorm.weight": (1, 0.3), "HcMix.scale": (0.8, 0.3), "HcMix.base": (0, 1)}
    wide |= {"HcIn.weight": (1, 0.3), "WindowKv.weight": (1, 0.3)}
    wide |= {"Gate.bias": (0, 0.1), "Gate.bias_image": (0, 0.1)}
    wide |= {"EngramMix.q_weight": (0, 1), "EngramMix.k_weight": (0, 1)}
    middle, spread = wide.get(name, (0, 2 if field == "sink" else shape[-1] ** -0.5))

    def values(count: int) -> Array:
        some = (middle + spread * rng.normal(size=count)).astype(np.float32)
        return bf16_bits(to_bf16(some)) if ref.dtype == "bf16" else some

    return tiled(shape, values)


def shrunk(op: Op) -> Op:
    """The same operation over fewer experts and table rows, which no kernel's work depends on."""
    for name, ref in op.refs:
        if ref.dtype == "fp4" and ref.shape[0] > EXPERTS:
            op = replace(op, **{name: replace(ref, shape=(EXPERTS, *ref.shape[1:]))})
        elif ref.dtype == "rows8" and ref.shape[0] > TABLE_ROWS:
            op = replace(op, **{name: replace(ref, shape=(TABLE_ROWS, *ref.shape[1:]))})
    return op
