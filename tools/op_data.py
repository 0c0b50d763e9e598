"""Plausible contents of an operation's buffers: full context, spread choices, no NaN.

Floats are normal or what their name asks for; weights are quantised normal values; integers follow
the meaning of their field. A long buffer is given by its beginning, to be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.numerics import bf16_bits, q8, qmx4
from ultraflash.graphs.ops.expert_rows import ExpertRows
from ultraflash.graphs.ops.experts_down import ExpertsDown
from ultraflash.graphs.ops.experts_up import ExpertsUp, wide_rows
from ultraflash.graphs.plan import Life, Op, Ref

Array = npt.NDArray[Any]
_KINDS = {"i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64}
PATTERN = 1 << 20  # elements of a beginning that is repeated


@dataclass(frozen=True)
class Setting:
    """How long conversations are and how tokens are drawn."""

    context: int
    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0


def contents(
    op: Op, name: str, ref: Ref, setting: Setting, rng: np.random.Generator,
    beside: Mapping[str, Array] = MappingProxyType({}),
) -> tuple[Array, ...]:  # fmt: skip
    """Arrays for each of a buffer's allocations, or their beginnings.

    `beside`: contents made so far of the operation's other buffers, which this one may depend on.
    """
    if isinstance(op, ExpertsUp | ExpertsDown) and name in ("order", "chunks"):
        experts = (op.w1 if isinstance(op, ExpertsUp) else op.w2).shape[0]
        ids = beside["ids"].reshape(op.ids.shape)
        order, chunks = ExpertRows.reference(ids, experts, wide_rows(ids.size, experts) or 1)
        return (order if name == "order" else chunks.reshape(-1),)
    count = min(prod(ref.shape), PATTERN)
    if ref.dtype in ("i32", "u32", "i64", "u64"):
        values = _INTEGERS.get(name, _nothing)(op, ref, setting, rng)
        return (_sized(values, count).astype(_KINDS[ref.dtype]),)
    if ref.dtype in ("fp8", "fp4", "rows8"):
        rows = np.float32(0.02) * rng.standard_normal((-(-count // 32), 32), np.float32)
        codes, scales = qmx4(rows) if ref.dtype == "fp4" else q8(rows)
        return codes.reshape(-1), scales.reshape(-1)
    if ref.dtype == "u8":
        return (_bytes(name, count, rng),)
    values = _floats(name, ref, count, setting, rng)
    return (bf16_bits(values) if ref.dtype == "bf16" else values,)


def _sized(values: Array, count: int) -> Array:
    """All values where they differ, else as many as a beginning has."""
    return np.repeat(values, count) if values.size == 1 else values.reshape(-1)


def _floats(
    name: str, ref: Ref, count: int, setting: Setting, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    fixed = {"temperature": setting.temperature, "top_p": setting.top_p, "bias": 0.0}
    if name in fixed:
        return np.full(count, fixed[name], np.float32)
    if name == "q" and ref.life is Life.STATE:  # a distribution over the vocabulary
        return (2 * rng.random(count, np.float32) / ref.shape[-1]).astype(np.float32)
    if name in ("pre", "post", "comb", "freq"):
        return rng.random(count, np.float32)
    return rng.standard_normal(count, np.float32) * np.float32(4 if name == "logits" else 1)


def _bytes(name: str, count: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Codes without E4M3's NaN; scales that are small both as E8M0 and as E4M3."""
    if "scales" in name:
        return rng.integers(112, 122, count, np.uint8)
    codes = rng.integers(0, 256, count, np.uint8)
    codes[codes % 128 == 127] -= 1
    return codes


def _nothing(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    return np.zeros(1, np.int64)


def _unused(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    return np.full(1, -1, np.int64)


def _everything(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    return np.full(1, 0xFFFFFFFF, np.int64)


def _position(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    """The last ones of the context."""
    return setting.context - ref.shape[0] + np.arange(ref.shape[0])


def _row_start(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    """Rows in equal parts; where drafts are verified, no more than a block has and one."""
    refs = {name: r for name, r in op.refs if name not in op.OUT}
    rows = next(refs[name] for name in ("slot", "x", "value") if name in refs).shape[0]
    if "q" in refs and refs["q"].life is Life.STATE:
        rows = min(rows, (refs["q"].shape[1] + 1) * (ref.shape[0] - 1))
    return np.linspace(0, rows, ref.shape[0]).astype(np.int64)


def _ids(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    """Experts: distinct and ascending in a row. Tokens: any of the vocabulary."""
    refs = dict(op.refs)
    weights = refs.get("w1") or refs.get("w2")
    experts = weights.shape[0] if weights else getattr(op, "experts", 0)
    if experts:
        rows, k = ref.shape
        return np.array([np.sort(rng.choice(experts, k, replace=False)) for _ in range(rows)])
    return _token(op, ref, setting, rng)


def _token(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    refs = dict(op.refs)
    table = refs.get("table") or refs.get("token_map")
    vocab = table.shape[0] if table else refs["logits"].shape[1] if "logits" in refs else 1
    return rng.integers(0, vocab, ref.shape)


def _rows(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    return rng.integers(0, dict(op.refs)["table"].shape[0], ref.shape)


def _sel(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    """As many different entries as there are, ascending, then -1."""
    return _ascending(ref, dict(op.refs)["main_codes"].shape[1], rng, newest=False)


def _pool(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    reach = setting.context // int(getattr(op, "ratio", 1))
    return _ascending(ref, -(-reach // int(getattr(op, "block_size", 1))), rng, newest=True)


def _ascending(ref: Ref, count: int, rng: np.random.Generator, *, newest: bool) -> Array:
    (rows, k), chosen = ref.shape, min(ref.shape[1], count)
    found = np.full((rows, k), -1, np.int64)
    edges = np.arange(chosen + 1) * count // max(chosen, 1)  # one of each equal part
    found[:, :chosen] = rng.integers(edges[:-1], edges[1:], (rows, chosen))
    if newest:
        found[:, chosen - 1] = count - 1
    return found


def _token_map(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    return np.arange(ref.shape[0])


def _odd(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    """Multipliers, and moduli that are not 0."""
    return 2 * rng.integers(500, 8_000_000, ref.shape) + 1


def _top_k(op: Op, ref: Ref, setting: Setting, rng: np.random.Generator) -> Array:
    return np.full(1, setting.top_k, np.int64)


_INTEGERS: dict[str, Callable[[Op, Ref, Setting, np.random.Generator], Array]] = {
    "position": _position,
    "at": _position,
    "row_start": _row_start,
    "ids": _ids,
    "token": _token,
    "anchor": _token,
    "drafts": _token,
    "rows": _rows,
    "sel": _sel,
    "pool": _pool,
    "token_map": _token_map,
    "multipliers": _odd,
    "primes": _odd,
    "mask": _everything,
    "bias_ids": _unused,
    "banned": _unused,
    "top_k": _top_k,
}
