"""Residual streams through a layer: hyper-connections around two sub-layers (model.md 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ultraflash.graphs.moe import moe
from ultraflash.graphs.ops.hc_expand import HcExpand
from ultraflash.graphs.ops.hc_in import HcIn
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Scope, Streams


@dataclass(frozen=True)
class Taken:
    """What a sub-layer takes from the streams, and how its result will enter them."""

    pre: Ref  # [T, C] f32, weights of the next collapse
    post: Ref  # [T, C] f32
    comb: Ref  # [T, C, C] f32
    x: Ref  # [T, D] bf16, normed
    x_q8: Ref  # its Q8 copy


def residual_layer(
    s: Scope,
    label: str,
    weights: str,
    streams: Streams,
    attention: Callable[[Ref, Ref], Ref],
    experts: tuple[int, int],
) -> Streams:
    """A whole layer (model.md 4.2); `attention` appends its nodes for the normed input [T, D] and
    its Q8 copy.

    `experts`: how many there are, how many serve a row. The new streams are `{label}.X` and
    `{label}.ffn.pre`.
    """
    attn, ffn = f"{label}.attn", f"{label}.ffn"
    taken = sublayer_input(s, attn, streams, weights, "attn")
    out = attention(taken.x, taken.x_q8)
    middle = expand(s, attn, out, streams.x, taken, f"{attn}.X")
    taken_ffn = sublayer_input(s, ffn, Streams(middle, taken.pre), weights, "ffn")
    out = moe(s, ffn, f"{weights}.ffn", taken_ffn.x, taken_ffn.x_q8, *experts)
    return Streams(expand(s, ffn, out, middle, taken_ffn, f"{label}.X"), taken_ffn.pre)


def sublayer_input(s: Scope, label: str, streams: Streams, weights: str, sublayer: str) -> Taken:
    """What sub-layer `label` begins with; its weights are `{weights}.hc_{sublayer}_fn/_scale/_base`
    and `{weights}.{sublayer}_norm`.
    """
    m, count, name = s.model, 2 * s.model.hc + s.model.hc**2, f"{weights}.hc_{sublayer}"
    taken = Taken(
        s.out(f"{label}.pre", (m.hc,), "f32"),
        s.out(f"{label}.post", (m.hc,), "f32"),
        s.out(f"{label}.comb", (m.hc, m.hc), "f32"),
        s.out(f"{label}_in", (m.hidden,)),
        s.out(f"{label}_in_q8", (m.hidden,)),
    )
    op = HcIn(
        x=streams.x,
        last_pre=streams.pre,
        fn=s.b.weight(f"{name}_fn", (count, m.hc * m.hidden), "f32"),
        scale=s.b.weight(f"{name}_scale", (3,), "f32"),
        base=s.b.weight(f"{name}_base", (count,), "f32"),
        weight=s.b.weight(f"{weights}.{sublayer}_norm", (m.hidden,), "bf16"),
        pre=taken.pre,
        post=taken.post,
        comb=taken.comb,
        y=taken.x,
        y_q8=taken.x_q8,
        iterations=m.sinkhorn_iters,
        eps=m.hc_eps,
        norm_eps=m.norm_eps,
    )
    s.b.add(f"{label}.in", op)
    return taken


def expand(s: Scope, label: str, out: Ref, x: Ref, taken: Taken, name: str) -> Ref:
    """The sub-layer's result back into the copies; the new streams are called `name`."""
    y = s.out(name, x.shape[1:])
    s.b.add(f"{label}.expand", HcExpand(out, x, taken.post, taken.comb, y))
    return y
