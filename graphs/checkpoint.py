"""Every tensor of the official checkpoint, derived from `Model` alone.

The neighbours may expect that `expected_tensors` is complete: what it lists must be in the files,
and nothing else may be. This file knows names, dtypes and shapes; it refuses to know files, ranks
and what a tensor is used for.

Source: model.md sections 2.1, 2.2 and 2.4 (checked against all published totals of the release).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ultraflash.graphs.model import Model

# Side of the square that one E8M0 scale of a dense FP8 matrix covers; length of the run elsewhere.
SCALE_BLOCK = 32

DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}

# Rows of the second table of model.md 2.4, in its order.
ROUTED = "routed experts"
ENGRAM_TABLES = "Engram tables"
DRAFT_ROUTED = "draft routed experts"
ATTENTION = "attention"
SHARED = "shared experts"
EMBEDDING = "token embedding"
HEAD = "LM head"
VISION = "vision tower + aligner + delimiters"
DRAFT = "draft attention, main_proj, gates, norms, HC, confidence"
ENGRAM = "Engram wkv + q/k weights"
DRAFT_SHARED = "draft shared experts"
ROUTERS = "routers"
MARKOV = "Markov head"
INDEXERS = "indexers"
HYPER = "hyper-connections"
COMPRESSORS = "compressors"
NORMS = "layer norms + final norm"
GROUPS = (
    ROUTED,
    ENGRAM_TABLES,
    DRAFT_ROUTED,
    ATTENTION,
    SHARED,
    EMBEDDING,
    HEAD,
    VISION,
    DRAFT,
    ENGRAM,
    DRAFT_SHARED,
    ROUTERS,
    MARKOV,
    INDEXERS,
    HYPER,
    COMPRESSORS,
    NORMS,
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor on disk looks like; `dtype` is the safetensors word, `shape` as stored."""

    dtype: str
    shape: tuple[int, ...]
    group: str


_Named = Iterator[tuple[str, TensorSpec]]


def expected_tensors(model: Model) -> dict[str, TensorSpec]:
    """All tensors of the official layout by name; vision only when the model has a vision tower."""
    return dict(_all(model))


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes on disk."""
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def parameters(spec: TensorSpec) -> int:
    """Logical parameters: scales count nothing, a byte of packed FP4 counts two."""
    if spec.dtype == "F8_E8M0":
        return 0
    return math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)


def _all(m: Model) -> _Named:
    yield "embed.weight", TensorSpec("BF16", (m.vocab, m.hidden), EMBEDDING)
    yield "head.weight", TensorSpec("BF16", (m.vocab, m.hidden), HEAD)
    yield "norm.weight", TensorSpec("BF16", (m.hidden,), NORMS)
    for layer in range(m.num_layers):
        prefix = f"layers.{layer}."
        yield from _block(m, prefix, m.experts)
        yield from _sources(m, prefix, layer)
        if layer in m.engram_layers:
            yield from _engram(m, prefix, m.engram_rows[m.engram_layers.index(layer)])
    for stage in range(m.draft_stages):
        yield from _block(m, f"mtp.{stage}.", m.draft_experts, draft=True)
    if m.draft_stages:
        yield from _draft(m)
    if m.vision_layers:
        yield from _vision(m)


def _block(m: Model, prefix: str, experts: int, draft: bool = False) -> _Named:
    """What every layer and every draft stage has."""
    attention, norms, routers, hyper = (DRAFT,) * 4 if draft else (ATTENTION, NORMS, ROUTERS, HYPER)
    yield from _plain(prefix, norms, attn_norm=(m.hidden,), ffn_norm=(m.hidden,))

    attn = prefix + "attn."
    yield from _fp8(attn + "wq_a", m.q_rank, m.hidden, attention)
    yield from _fp8(attn + "wq_b", m.heads * m.head_dim, m.q_rank, attention)
    yield from _fp8(attn + "wkv", m.head_dim, m.hidden, attention)
    yield from _fp8(attn + "wo_a", m.o_groups * m.o_rank, m.heads_per_group * m.head_dim, attention)
    yield from _fp8(attn + "wo_b", m.hidden, m.o_groups * m.o_rank, attention)
    yield from _plain(attn, attention, q_norm=(m.q_rank,), kv_norm=(m.head_dim,))
    yield attn + "attn_sink", TensorSpec("F32", (m.heads,), attention)

    mixes = (2 + m.hc) * m.hc
    for part in ("attn", "ffn"):
        yield f"{prefix}hc_{part}_fn", TensorSpec("F32", (mixes, m.hc * m.hidden), hyper)
        yield f"{prefix}hc_{part}_base", TensorSpec("F32", (mixes,), hyper)
        yield f"{prefix}hc_{part}_scale", TensorSpec("F32", (3,), hyper)

    yield from _plain(prefix + "ffn.", routers, gate=(experts, m.hidden))
    yield prefix + "ffn.gate.bias", TensorSpec("F32", (experts,), routers)
    if m.vision_layers:
        yield prefix + "ffn.gate.bias_vl", TensorSpec("F32", (experts,), routers)
    width = m.expert_width
    for expert in range(experts):
        name, group = f"{prefix}ffn.experts.{expert}.", DRAFT_ROUTED if draft else ROUTED
        yield from _fp4(name + "w1", width, m.hidden, group)
        yield from _fp4(name + "w3", width, m.hidden, group)
        yield from _fp4(name + "w2", m.hidden, width, group)
    shared, width = DRAFT_SHARED if draft else SHARED, m.expert_width * m.shared_experts
    yield from _fp8(prefix + "ffn.shared_experts.w1", width, m.hidden, shared)
    yield from _fp8(prefix + "ffn.shared_experts.w3", width, m.hidden, shared)
    yield from _fp8(prefix + "ffn.shared_experts.w2", m.hidden, width, shared)


def _sources(m: Model, prefix: str, layer: int) -> _Named:
    """Compressor and index keys of KV sources, index queries of index sources."""
    attn = prefix + "attn."
    if layer in m.kv_sources:
        yield from _plain(
            attn + "compressor.", COMPRESSORS, wkv=(m.head_dim, m.hidden), norm=(m.head_dim,)
        )
        if m.ratio(layer) > 1:
            yield from _plain(attn + "compressor.", COMPRESSORS, wgate=(m.head_dim, m.hidden))
        yield from _plain(
            attn + "indexer.", INDEXERS, wk=(m.index_dim, m.head_dim), k_norm=(m.index_dim,)
        )
    if layer in m.index_sources:
        yield from _fp8(attn + "indexer.wq_b", m.index_heads * m.index_dim, m.q_rank, INDEXERS)
        yield from _plain(attn + "indexer.", INDEXERS, weights_proj=(m.index_heads, m.hidden))


def _engram(m: Model, prefix: str, rows: int) -> _Named:
    name = prefix + "engram."
    yield name + "embed.weight", TensorSpec("F8_E4M3", (rows, m.engram_dim), ENGRAM_TABLES)
    yield (
        name + "embed.scale",
        TensorSpec("F8_E8M0", (rows, m.engram_dim // SCALE_BLOCK), ENGRAM_TABLES),
    )
    yield from _fp8(name + "wkv", (m.hc + 1) * m.hidden, m.engram_columns * m.engram_dim, ENGRAM)
    for part in (
        "q_weight",
        "k_weight",
    ):  # parameters of the module itself, hence no `.weight` behind the name
        yield name + part, TensorSpec("BF16", (m.hc, m.hidden), ENGRAM)


def _draft(m: Model) -> _Named:
    """What only the first and the last draft stage have."""
    first, last = "mtp.0.", f"mtp.{m.draft_stages - 1}."
    yield from _fp8(first + "main_proj", m.hidden, m.tap_width, DRAFT)
    yield from _plain(first, DRAFT, main_norm=(m.hidden,))
    yield from _plain(last, DRAFT, norm=(m.hidden,))
    rank = m.draft_markov_rank
    yield from _plain(last + "markov_head.", MARKOV, embed=(m.vocab, rank), head=(m.vocab, rank))
    yield from _plain(last + "confidence_head.", DRAFT, proj=(1, m.hidden + rank))


def _vision(m: Model) -> _Named:
    dim, width = m.vision_dim, m.vision_width
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (dim, 3 * m.vision_patch**2),
        "vision.patch_embed.proj.bias": (dim,),
    }
    for block in range(m.vision_layers):
        shapes |= {
            f"vision.blocks.{block}.{name}": shape
            for name, shape in (
                ("norm1.weight", (dim,)),
                ("attn.wqkv.weight", (3 * dim, dim)),
                ("attn.wqkv.bias", (3 * dim,)),
                ("attn.wo.weight", (dim, dim)),
                ("attn.wo.bias", (dim,)),
                ("norm2.weight", (dim,)),
                ("mlp.w1.weight", (2 * width, dim)),
                ("mlp.w2.weight", (dim, width)),
            )
        }
    shapes |= {
        "vision.norm.weight": (dim,),
        "aligner.w1.weight": (m.hidden, dim * m.vision_downsample**2),
        "aligner.w1.bias": (m.hidden,),
        "aligner.w2.weight": (m.hidden, m.hidden),
        "aligner.w2.bias": (m.hidden,),
        "image_start": (m.hidden,),
        "image_end": (m.hidden,),
        "image_newline": (m.hidden,),
    }
    for name, shape in shapes.items():
        yield name, TensorSpec("BF16", shape, VISION)


def _plain(prefix: str, group: str, **shapes: tuple[int, ...]) -> _Named:
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", TensorSpec("BF16", shape, group)


def _fp8(name: str, rows: int, columns: int, group: str) -> _Named:
    blocks = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
    yield name + ".weight", TensorSpec("F8_E4M3", (rows, columns), group)
    yield name + ".scale", TensorSpec("F8_E8M0", blocks, group)


def _fp4(name: str, rows: int, columns: int, group: str) -> _Named:
    yield name + ".weight", TensorSpec("I8", (rows, columns // 2), group)
    yield name + ".scale", TensorSpec("F8_E8M0", (rows, columns // SCALE_BLOCK), group)
