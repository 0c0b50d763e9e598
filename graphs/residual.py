"""Residual streams through a layer: hyper-connections around two sub-layers (model.md 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ultraflash.graphs.moe import moe
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.hc_expand import HcExpand
from ultraflash.graphs.ops.hc_mix import HcMix
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Scope, Streams


@dataclass(frozen=True)
class Mixed:
    """Coefficients of one sub-layer."""

    pre: Ref
    post: Ref
    comb: Ref


def residual_layer(
    s: Scope,
    label: str,
    weights: str,
    streams: Streams,
    attention: Callable[[Ref], Ref],
    experts: tuple[int, int],
) -> Streams:
    """A whole layer (model.md 4.2); `attention` appends its nodes for the normed input [T, D].

    `experts`: how many there are, how many serve a row. The new streams are `{label}.X` and
    `{label}.ffn.pre`.
    """
    attn, ffn = f"{label}.attn", f"{label}.ffn"
    mixed = hc_mix(s, attn, f"{weights}.hc_attn", streams.x)
    out = attention(sublayer_input(s, attn, streams, f"{weights}.attn_norm"))
    middle = expand(s, attn, out, streams.x, mixed, f"{attn}.X")
    mixed_ffn = hc_mix(s, ffn, f"{weights}.hc_ffn", middle)
    ffn_in = sublayer_input(s, ffn, Streams(middle, mixed.pre), f"{weights}.ffn_norm")
    out = moe(s, ffn, f"{weights}.ffn", ffn_in, *experts)
    return Streams(expand(s, ffn, out, middle, mixed_ffn, f"{label}.X"), mixed_ffn.pre)


def hc_mix(s: Scope, label: str, weights: str, x: Ref) -> Mixed:
    """Hyper-connection coefficients from the streams before a sub-layer; `weights` names
    `..._fn/_scale/_base`.
    """
    m, count = s.model, 2 * s.model.hc + s.model.hc**2
    mixed = Mixed(
        s.out(f"{label}.pre", (m.hc,), "f32"),
        s.out(f"{label}.post", (m.hc,), "f32"),
        s.out(f"{label}.comb", (m.hc, m.hc), "f32"),
    )
    fn = s.b.weight(f"{weights}_fn", (count, m.hc * m.hidden), "f32")
    scale, base = (
        s.b.weight(f"{weights}_scale", (3,), "f32"),
        s.b.weight(f"{weights}_base", (count,), "f32"),
    )
    op = HcMix(
        x,
        fn,
        scale,
        base,
        mixed.pre,
        mixed.post,
        mixed.comb,
        m.sinkhorn_iters,
        m.hc_eps,
        m.norm_eps,
    )
    s.b.add(f"{label}.mix", op)
    return mixed


def sublayer_input(s: Scope, label: str, streams: Streams, norm: str) -> Ref:
    """Collapse the copies with the weights from one sub-layer ago, then norm."""
    y = s.out(f"{label}.collapsed", (s.model.hidden,))
    s.b.add(f"{label}.collapse", HcCollapse(streams.x, streams.pre, y))
    return s.norm(f"{label}_in", y, norm)


def expand(s: Scope, label: str, out: Ref, x: Ref, mixed: Mixed, name: str) -> Ref:
    """The sub-layer's result back into the copies; the new streams are called `name`."""
    y = s.out(name, x.shape[1:])
    s.b.add(f"{label}.expand", HcExpand(out, x, mixed.post, mixed.comb, y))
    return y
