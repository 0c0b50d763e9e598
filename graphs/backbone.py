"""From token ids to the streams behind the last layer, and from there to logits (model.md section
4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ultraflash.graphs.globalkv import GlobalStore
from ultraflash.graphs.layers import (
    Angles,
    Scope,
    Streams,
    angles,
    attend,
    engram,
    queries,
    residual_layer,
    ring,
    window_rows,
    write_ring,
)
from ultraflash.graphs.ops.comm import AllGather
from ultraflash.graphs.ops.embed import Embed
from ultraflash.graphs.ops.engram_ids import EngramIds
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.stream_mean import StreamMean
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


@dataclass(frozen=True)
class Backbone:
    """What leaves the last layer, and the drafting input gathered on the way."""

    streams: Streams
    taps: Ref | None  # [T, targets*D] bf16


def all_layers(s: Scope, taps: bool) -> Backbone:
    """The whole backbone; the Engram history is written behind it. Streams: `L{n}.X`, `L{n}.ffn.pre`."""
    m = s.model
    shared, streams = prologue(s)
    store = GlobalStore(s, shared.groups)
    tapped: Ref | None = None
    for number in range(m.num_layers):
        x = streams.x
        if number in m.engram_layers and shared.engram_ids and shared.engram_history:
            x = engram(s, number, x, shared.engram_ids, shared.engram_history)
        if taps and number in m.draft_targets:
            tapped = _tap(s, number, x, tapped)
        streams = residual_layer(
            s,
            f"L{number}",
            f"layers.{number}",
            Streams(x, streams.pre),
            partial(attention, s, number, shared=shared, store=store),
            (m.experts, m.active_experts),
        )
    if shared.engram_ids and shared.engram_history:
        write_ring(s, "step_end.engram", shared.engram_ids, shared.engram_history)
    return Backbone(streams, tapped)


def _tap(s: Scope, number: int, x: Ref, before: Ref | None) -> Ref:
    width = s.model.hidden + (before.shape[1] if before else 0)
    y = s.out(f"L{number}.tap", (width,))
    s.b.add(f"L{number}.tap", StreamMean(x, before, y))
    return y


def head(s: Scope, streams: Streams) -> Ref:
    """Logits of every row, [rows, V] f32 on every rank."""
    h = s.out("head.h", (s.model.hidden,))
    s.b.add("head.collapse", HcCollapse(streams.x, streams.pre, h))
    return head_logits(s, "head", s.norm("head.in", h, "norm"))


def head_logits(s: Scope, label: str, x: Ref) -> Ref:
    """The language model head of normed rows; ranks exchange their parts of the vocabulary."""
    m = s.model
    part = s.linear(f"{label}.logits", x, "head", s.split(m.vocab), "bf16", "f32")
    return gather(s, label, part)


def gather(s: Scope, label: str, part: Ref) -> Ref:
    """All ranks' logits side by side, [rows, V] f32."""
    if s.b.world == 1:
        return part
    logits = s.out(f"{label}.logits_all", (s.model.vocab,), "f32")
    s.b.add(f"{label}.gather", AllGather(part, logits))
    return logits
