"""Values of a configuration that cannot work together, each told in one clause.

A checkpoint with such a configuration would fail deep inside a plan, or compute something else than
its authors meant. `Model` asks here before anybody else sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultraflash.graphs.model import Model

_AT_LEAST_ONE = (
    *("vocab", "hidden", "num_layers", "heads", "head_dim", "rope_dim", "q_rank", "o_groups"),
    *("o_rank", "window", "index_heads", "index_dim", "index_topk", "candidate_blocks"),
    *("candidate_block_size", "experts", "active_experts", "expert_width", "max_position", "hc"),
    *("sinkhorn_iters", "yarn_original"),
)
_GROUP = 32  # values that share a scale


def contradictions(m: Model) -> list[str]:
    """Every contradiction found; sizes below 1 alone, for nothing else can be judged then."""
    too_small = [f"{name} is {getattr(m, name)}" for name in _AT_LEAST_ONE if getattr(m, name) < 1]
    if too_small:
        return [*too_small, "sizes are at least 1"]
    return [*_shapes(m), *_layers(m), *_experts(m), *_tokens(m)]


def _shapes(m: Model) -> Iterator[str]:
    if m.heads % m.o_groups:
        yield f"heads {m.heads} are not a multiple of output groups {m.o_groups}"
    if m.rope_dim % 2 or m.rope_dim > m.head_dim:
        yield f"rope dims {m.rope_dim} do not fit head dim {m.head_dim}"
    if m.rope_dim > m.index_dim:
        yield f"rope dims {m.rope_dim} do not fit index dim {m.index_dim}"
    if min(m.rope_theta, m.compress_rope_theta) <= 1 or m.yarn_factor <= 0:
        yield "rope thetas must be above 1 and the YaRN factor above 0"
    if min(m.yarn_beta_fast, m.yarn_beta_slow) <= 0:
        yield f"YaRN betas {m.yarn_beta_fast} and {m.yarn_beta_slow} must be above 0"
    # Powers of four only: else the official product of the two factors is rounded to bf16
    # (model.md 4.6).
    size = m.index_dim * m.index_heads
    if size & (size - 1) or size.bit_length() % 2 == 0:
        yield f"index heads x dim {size} is not a power of 4"
    for name, value in (
        ("hidden", m.hidden),
        ("head dim", m.head_dim),
        ("index dim", m.index_dim),
        ("q rank", m.q_rank),
        ("expert width", m.expert_width),
        ("engram dim", m.engram_dim),
        ("output groups x rank", m.o_groups * m.o_rank),
    ):
        if value % _GROUP:
            yield f"{name} {value} is not a multiple of the quantisation group {_GROUP}"


def _layers(m: Model) -> Iterator[str]:
    if len(m.compress_ratios) < m.num_layers + m.draft_stages:
        yield (
            f"{len(m.compress_ratios)} compress ratios for {m.num_layers} layers "
            f"and {m.draft_stages} draft stages"
        )
        return  # the roles of layers cannot be judged
    if not set(m.compress_ratios) <= {0, 1, 2}:
        yield f"compress ratios {sorted(set(m.compress_ratios))} beyond 0, 1, 2"
    lists = {
        "KV source": m.kv_sources,
        "index source": m.index_sources,
        "Engram": m.engram_layers,
        "draft target": m.draft_targets,
    }
    strange = [
        f"{name} layers {list(layers)} are not ascending numbers below {m.num_layers}"
        for name, layers in lists.items()
        if list(layers) != sorted(set(layers) & set(range(m.num_layers)))
    ]
    yield from strange
    if len(m.engram_rows) != len(m.engram_layers):
        yield "engram layers and table sizes differ in number"
    if m.engram_layers and (m.engram_max_order < 2 or m.engram_heads < 1):
        yield f"Engram needs n-grams of 2 and a head, not {m.engram_max_order} and {m.engram_heads}"
    if not strange:
        yield from _sources(m)


def _sources(m: Model) -> Iterator[str]:
    if not set(m.kv_sources) <= set(m.index_sources):
        yield "a KV source is no index source"
    if m.candidate_source not in m.index_sources:
        yield "the candidate source is no index source"
    if m.kv_sources and m.candidate_source < m.kv_sources[-1]:
        yield (
            f"the pool of candidate source {m.candidate_source} holds no entries of "
            f"KV source {m.kv_sources[-1]}"
        )
    if not m.kv_sources:
        yield "there is no KV source"
        return
    for layer in range(m.num_layers):
        ratio, source = m.ratio(layer), max((s for s in m.kv_sources if s <= layer), default=None)
        if ratio == 0 and layer in m.index_sources:
            yield f"index source {layer} has compress ratio 0"
        elif ratio and source is None:
            yield f"layer {layer} has compress ratio {ratio} but no KV source at or below it"
        elif ratio and source is not None and m.ratio(source) != ratio:
            yield (
                f"layer {layer} has compress ratio {ratio}, its KV source {source} has "
                f"{m.ratio(source)}"
            )
    if (m.candidate_blocks - 1) * m.candidate_block_size + 1 < m.index_topk:
        yield (
            f"{m.candidate_blocks} candidate blocks of {m.candidate_block_size} "
            f"cannot hold top-k {m.index_topk}"
        )


def _experts(m: Model) -> Iterator[str]:
    if m.score_function != "sqrtsoftplus":
        yield f"gate score {m.score_function!r} is unknown (sqrtsoftplus only)"
    if m.active_experts > m.experts:
        yield f"top-{m.active_experts} of {m.experts} experts"
    if m.draft_active_experts > m.draft_experts:
        yield f"top-{m.draft_active_experts} of {m.draft_experts} draft experts"
    if m.shared_experts != 1:
        yield f"{m.shared_experts} shared experts (one only)"


def _tokens(m: Model) -> Iterator[str]:
    named = {
        "bos": m.bos,
        "eos": m.eos,
        "pad": m.pad,
        "engram pad": m.engram_pad,
        "draft noise": m.draft_noise,
    }
    if m.image_token != -1:  # -1: the model takes no images
        named["image"] = m.image_token
    for name, token in named.items():
        if not 0 <= token < m.vocab:
            yield f"{name} token {token} is not in the vocabulary of {m.vocab}"
