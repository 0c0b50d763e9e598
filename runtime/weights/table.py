"""The table: our weight names, the checkpoint tensors behind each, and how it is split over ranks.

Our names are the official module names without `.weight`; the routed experts of a layer are stacked
into one array [experts, out, in]. The table follows from `Model` alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ultraflash.graphs import rotary
from ultraflash.graphs.checkpoint import (
    ENGRAM_TABLES,
    VISION,
    TensorSpec,
    expected_tensors,
)
from ultraflash.graphs.model import Model
from ultraflash.runtime.errors import WeightsError

# Axis of the logical array that is split over ranks, by role (the name within its layer or stage).
_AXES = {
    "head": 0,
    "attn.wq_b": 0,
    "attn.attn_sink": 0,
    "attn.wo_a": 0,
    "attn.wo_b": 1,
    "attn.indexer.wq_b": 0,
    "attn.indexer.weights_proj": 0,
    "ffn.experts.w1": 1,
    "ffn.experts.w3": 1,
    "ffn.experts.w2": 2,
    "ffn.shared_experts.w1": 0,
    "ffn.shared_experts.w3": 0,
    "ffn.shared_experts.w2": 1,
    "markov_head.head": 0,
}
# Matrices that linears multiply by; everything else is a vector, or rows that are looked up.
_LINEAR = re.compile(
    r"head|attn\.w(q_a|q_b|kv|o_a|o_b)|attn\.compressor\.w(kv|gate)"
    r"|attn\.indexer\.(wk|wq_b|weights_proj)|hc_(attn|ffn)_fn|ffn\.gate"
    r"|ffn\.(shared_)?experts\.w[123]|engram\.wkv|main_proj|markov_head\.head"
    r"|confidence_head\.proj"
)
_ROLE = re.compile(r"^(?:layers|mtp)\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FORMATS = {"BF16": "bf16", "F32": "f32", "F8_E4M3": "fp8", "I8": "fp4"}
# (logical elements one stored element stands for) along rows and columns.
_GRAIN = {"fp8": (32, 32), "fp4": (1, 32), "rows8": (1, 32)}

TOKEN_MAP = "engram.token_map"


@dataclass(frozen=True, slots=True)
class Row:
    """One of our weights.

    `sources` are the tensors it is made of, each quantised one followed by its scales; empty for
    what is computed. `axis` of the logical `shape` is split over ranks, None = all have it whole.
    `dtype` is the NumPy type of the host form (`rows8` stays mapped and keeps its bytes).
    """

    name: str
    sources: tuple[str, ...]
    format: str
    axis: int | None
    dtype: str
    shape: tuple[int, ...]


def weight_table(model: Model) -> dict[str, Row]:
    """Every weight of the language model and its drafts, by our name; vision is left out."""
    sources: dict[str, list[str]] = {}
    specs = expected_tensors(model)
    for name, spec in specs.items():
        if spec.group != VISION:
            sources.setdefault(our_name(name), []).append(name)
    table = {name: _row(name, tuple(parts), specs) for name, parts in sources.items()}
    return table | {row.name: row for row in _computed(model)}


def our_name(tensor: str) -> str:
    """The weight that a checkpoint tensor belongs to."""
    return _EXPERT.sub(".experts.", tensor.removesuffix(".weight").removesuffix(".scale"))


def shard_range(row: Row, world: int, rank: int) -> slice:
    """The part of `row.axis` that a rank holds, in logical elements.

    Raises:
        WeightsError: when the parts are unequal or do not end where a group of scales ends.
    """
    assert row.axis is not None
    size = row.shape[row.axis]
    grain = _GRAIN.get(row.format, (1, 1))[row.axis - len(row.shape)]
    if size % (world * grain):
        raise WeightsError(
            f"{row.name} cannot be split over {world} ranks: {size} along axis {row.axis} is no "
            f"multiple of {world} x {grain}, where its groups of scales end; choose a smaller world"
        )
    part = size // world
    return slice(rank * part, (rank + 1) * part)


def stored_slices(row: Row, source: str, world: int, rank: int) -> tuple[slice, ...]:
    """The index that cuts a rank's part out of one stored tensor of `row`.

    Raises:
        WeightsError: as `shard_range`.
    """
    if row.axis is None:
        return ()
    part = shard_range(row, world, rank)
    # Experts are stacked only in the logical array, so their stored tensors have an axis fewer.
    dims = min(len(row.shape), 2)
    axis = row.axis - len(row.shape) + dims
    per = _elements_per_stored(row.format, source.endswith(".scale"), axis)
    cut = [slice(None)] * dims
    cut[axis] = slice(part.start // per, part.stop // per)
    return tuple(cut)


def cut_specs(model: Model, world: int) -> dict[str, TensorSpec]:
    """What every rank of a pre-sharded checkpoint holds: official names, shapes of the parts.

    Raises:
        WeightsError: as `shard_range`.
    """
    table, specs = weight_table(model), expected_tensors(model)
    for row in table.values():
        if row.axis is not None:
            for source in row.sources:
                index = stored_slices(row, source, world, 0)
                shape = tuple(
                    len(range(n)[part]) for n, part in zip(specs[source].shape, index, strict=True)
                )
                specs[source] = replace(specs[source], shape=shape)
    return specs


def _elements_per_stored(format: str, is_scale: bool, axis: int) -> int:
    if is_scale:
        return _GRAIN[format][axis]
    return 2 if format == "fp4" and axis == 1 else 1


def _row(name: str, parts: tuple[str, ...], specs: dict[str, TensorSpec]) -> Row:
    first = specs[parts[0]]
    role = _ROLE.sub("", name)
    format = "rows8" if first.group == ENGRAM_TABLES else _FORMATS[first.dtype]
    shape = first.shape
    if format == "fp4":
        shape = (len(parts) // 2, shape[0], shape[1] * 2)
    dtype = "float64" if _LINEAR.fullmatch(role) else "float32"
    return Row(name, parts, format, _AXES.get(role), "uint8" if format == "rows8" else dtype, shape)


def _computed(model: Model) -> list[Row]:
    """Constants that no file holds: rotary frequencies and the Engram hash."""
    rows = [
        Row(f"rope.{t}", (), "f32", None, "float32", (model.rope_dim // 2,)) for t in rotary.TABLES
    ]
    if not model.engram_layers:
        return rows
    columns = (model.engram_columns,)
    shapes = {TOKEN_MAP: (model.vocab,)}
    for layer in model.engram_layers:
        prefix = f"layers.{layer}.engram."
        shapes[prefix + "multipliers"] = (model.engram_max_order,)
        shapes |= {prefix + "primes": columns, prefix + "offsets": columns}
    return rows + [Row(name, (), "int64", None, "int64", shape) for name, shape in shapes.items()]
