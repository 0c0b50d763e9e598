"""From token ids to the streams behind the last layer, and from there to logits (model.md section
4.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ultraflash.graphs.attention import attend, project
from ultraflash.graphs.globalkv import GlobalStore
from ultraflash.graphs.ngrams import engram
from ultraflash.graphs.ops.all_gather import AllGather
from ultraflash.graphs.ops.embed import Embed
from ultraflash.graphs.ops.engram_ids import EngramIds
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.stream_mean import StreamMean
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.residual import residual_layer
from ultraflash.graphs.scope import Angles, Scope, Streams, angles, ring, write_ring


@dataclass(frozen=True)
class Shared:
    """What all layers of a step share."""

    plain: Angles
    compressed: Angles
    store: GlobalStore
    engram_ids: Ref | None = None  # [T] i32
    engram_history: Ref | None = None  # [slots, R] i32


def shared(s: Scope) -> Shared:
    """Angles of this step's positions, and a store that no layer has filled yet."""
    m = s.model
    plain, compressed = (
        angles(s, "step.plain", "plain"),
        angles(s, "step.compressed", "compressed", beside=True),
    )
    groups = {
        r: compressed if r == 1 else angles(s, f"step.group{r}", "compressed", 1 - r, beside=True)
        for r in sorted({m.ratio(layer) for layer in m.kv_sources})
    }
    return Shared(plain, compressed, GlobalStore(s, groups))


def embedded(s: Scope, with_angles: Shared) -> tuple[Shared, Streams]:
    """Embedding of the step's tokens, and their compressed ids for the Engram layers."""
    m, io = s.model, s.io
    x, pre = s.out("embed.x", (m.hc, m.hidden)), s.out("embed.pre", (m.hc,), "f32")
    table = s.b.weight("embed", (m.vocab, m.hidden), "bf16")
    s.b.add("step.embed", Embed(io.ids, table, x, pre, m.hc))
    if not m.engram_layers:
        return with_angles, Streams(x, pre)
    ids, history = s.out("engram.ids", (), "i32"), ring(s, "engram.history", (), "i32")
    token_map = s.b.weight("engram.token_map", (m.vocab,), "i64")
    s.b.add("step.engram_ids", EngramIds(io.ids, io.is_image, token_map, ids))
    return replace(with_angles, engram_ids=ids, engram_history=history), Streams(x, pre)


def attention(
    s: Scope, number: int, common: Shared, x: Ref, x_q8: Ref, meanwhile: Callable[[], None]
) -> Ref:
    """The attention sub-layer of layer `number` on its normed input (`residual.Attend`)."""
    m, label, weights = s.model, f"L{number}.attn", f"layers.{number}.attn"
    ratio = m.ratio(number)
    at = common.compressed if ratio else common.plain
    made = project(s, label, weights, x_q8, at)
    if number in m.kv_sources and number not in common.store.main:
        common.store.add_entries(number, x)
    if number in m.index_sources:
        common.store.select(number, x, made.low_q8, at)
    seen = common.store.seen_by(number) if ratio else None
    return attend(s, label, weights, made.q, made.kv, seen, at, meanwhile)


@dataclass(frozen=True)
class Backbone:
    """What leaves the last layer, and the drafting input gathered on the way."""

    streams: Streams
    taps: Ref | None  # [T, targets*D] bf16


def layers(s: Scope, numbers: range, streams: Streams, common: Shared, taps: bool) -> Backbone:
    """Some layers in a row. Streams that leave layer n are called `L{n}.X` and `L{n}.ffn.pre`."""
    m = s.model
    tapped: Ref | None = None
    for number in numbers:
        x = streams.x
        if number in m.engram_layers and common.engram_ids and common.engram_history:
            x = engram(s, number, x, common.engram_ids, common.engram_history)
        if taps and number in m.draft_targets:
            tapped = _tap(s, number, x, tapped)
        streams = residual_layer(
            s,
            f"L{number}",
            f"layers.{number}",
            Streams(x, streams.pre),
            partial(attention, s, number, common),
            (m.experts, m.active_experts),
        )
    return Backbone(streams, tapped)


def all_layers(s: Scope, taps: bool) -> Backbone:
    """The whole backbone from token ids on."""
    common, streams = embedded(s, shared(s))
    out = layers(s, range(s.model.num_layers), streams, common, taps)
    write_history(s, common)
    return out


def write_history(s: Scope, common: Shared) -> None:
    """This step's compressed ids enter the Engram history, behind everybody who read it."""
    if common.engram_ids and common.engram_history:
        write_ring(s, "step_end.engram", common.engram_ids, common.engram_history)


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
    logits = s.out(f"{part.name}_all", (s.model.vocab,), "f32")
    s.b.add(f"{label}.gather", AllGather(part, logits))
    return logits
