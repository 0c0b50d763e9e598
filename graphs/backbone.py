"""From token ids to the streams behind the last layer, and from there to logits (model.md section
4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.globalkv import GlobalStore
from ultraflash.graphs.layers import (
    Angles,
    Scope,
    Streams,
    angles,
    attend,
    engram,
    expand,
    hc_mix,
    moe,
    queries,
    ring,
    sublayer_input,
    window_rows,
    write_ring,
)
from ultraflash.graphs.ops.comm import AllGather
from ultraflash.graphs.ops.embed import Embed
from ultraflash.graphs.ops.engram_ids import EngramIds
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.plan import Ref


@dataclass(frozen=True)
class Prologue:
    """What all layers share in a step."""

    plain: Angles
    compressed: Angles
    groups: dict[int, Angles]
    engram_ids: Ref | None
    engram_history: Ref | None


def prologue(s: Scope) -> tuple[Prologue, Streams]:
    """Embedding, angles and compressed ids."""
    m, io = s.model, s.io
    x, pre = s.out("embed.x", (m.hc, m.hidden)), s.out("embed.pre", (m.hc,), "f32")
    s.b.add(
        "step.embed", Embed(io.ids, s.b.weight("embed", (m.vocab, m.hidden), "bf16"), x, pre, m.hc)
    )
    plain, compressed = angles(s, "step.plain", "plain"), angles(s, "step.compressed", "compressed")
    ratios = sorted({m.ratio(layer) for layer in m.kv_sources})
    groups = {
        r: compressed if r == 1 else angles(s, f"step.group{r}", "compressed", 1 - r)
        for r in ratios
    }
    ids = history = None
    if m.engram_layers:
        ids, history = s.out("engram.ids", (), "i32"), ring(s, "engram.history", (), "i32")
        token_map = s.b.weight("engram.token_map", (m.vocab,), "i64")
        s.b.add("step.engram_ids", EngramIds(io.ids, io.is_image, token_map, ids))
    return Prologue(plain, compressed, groups, ids, history), Streams(x, pre)


def layer(s: Scope, number: int, streams: Streams, shared: Prologue, store: GlobalStore) -> Streams:
    """One backbone layer; its streams are called `L{number}.X` and `L{number}.pre`."""
    m, label, weights = s.model, f"L{number}", f"layers.{number}"
    x = streams.x
    if (
        number in m.engram_layers
        and shared.engram_ids is not None
        and shared.engram_history is not None
    ):
        x = engram(s, number, x, shared.engram_ids, shared.engram_history)
    attn = f"{label}.attn"
    mixed = hc_mix(s, attn, f"{weights}.hc_attn", x)
    attn_in = sublayer_input(s, attn, Streams(x, streams.pre), f"{weights}.attn_norm")
    out = attention(s, number, attn_in, shared, store)
    middle = expand(s, attn, out, x, mixed, f"{attn}.X")
    ffn = f"{label}.ffn"
    mixed_ffn = hc_mix(s, ffn, f"{weights}.hc_ffn", middle)
    ffn_in = sublayer_input(s, ffn, Streams(middle, mixed.pre), f"{weights}.ffn_norm")
    out = moe(s, ffn, f"{weights}.ffn", ffn_in, m.experts, m.active_experts)
    return Streams(expand(s, ffn, out, middle, mixed_ffn, f"{label}.X"), mixed_ffn.pre)


def attention(s: Scope, number: int, x: Ref, shared: Prologue, store: GlobalStore) -> Ref:
    """The attention sub-layer of layer `number` on its normed input. [T, D] bf16."""
    m, label, weights = s.model, f"L{number}.attn", f"layers.{number}.attn"
    ratio = m.ratio(number)
    at = shared.compressed if ratio else shared.plain
    x_q8 = s.quant8(f"{label}_in_q8", x)
    q, low_q8 = queries(s, label, weights, x_q8, at)
    kv = window_rows(s, label, weights, x_q8, at)
    if number in m.kv_sources:
        store.add_entries(number, x)
    if number in m.index_sources:
        store.select(number, x, low_q8, at)
    return attend(s, label, weights, q, kv, store.seen_by(number) if ratio else None, at)


def all_layers(s: Scope) -> Streams:
    """The whole backbone; the Engram history is written behind it."""
    shared, streams = prologue(s)
    store = GlobalStore(s, shared.groups)
    for number in range(s.model.num_layers):
        streams = layer(s, number, streams, shared, store)
    if shared.engram_ids is not None and shared.engram_history is not None:
        write_ring(s, "step_end.engram", shared.engram_ids, shared.engram_history)
    return streams


def head(s: Scope, streams: Streams) -> Ref:
    """Logits of every row, [rows, V] f32 on every rank."""
    m = s.model
    h = s.out("head.h", (m.hidden,))
    s.b.add("head.collapse", HcCollapse(streams.x, streams.pre, h))
    part = s.linear(
        "head.logits", s.norm("head.in", h, "norm"), "head", s.split(m.vocab), "bf16", "f32"
    )
    if s.b.world == 1:
        return part
    logits = s.out("head.logits_all", (m.vocab,), "f32")
    s.b.add("head.gather", AllGather(part, logits))
    return logits
