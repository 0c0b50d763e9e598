"""Residual streams through a layer: hyper-connections around two sub-layers (model.md 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ultraflash.graphs.moe import moe
from ultraflash.graphs.ops.hc_expand import HcExpand
from ultraflash.graphs.ops.hc_in import HcIn
from ultraflash.graphs.ops.hc_mix import HcMix
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Scope, Streams


@dataclass(frozen=True)
class Mixed:
    """Coefficients of one sub-layer."""

    pre: Ref
    post: Ref
    comb: Ref


class Attend(Protocol):
    """Appends the nodes of an attention sub-layer."""

    def __call__(self, x: Ref, x_q8: Ref, meanwhile: Callable[[], None]) -> Ref:
        """The result [T, D] for the normed input [T, D] and its Q8 copy; `meanwhile` appends a node
        that may run beside any other here, and is called behind the longest.
        """


def residual_layer(
    s: Scope, label: str, weights: str, streams: Streams, attention: Attend,
    experts: tuple[int, int],
) -> Streams:  # fmt: skip
    """A whole layer (model.md 4.2).

    `experts`: how many there are, how many serve a row. The new streams are `{label}.X` and
    `{label}.ffn.pre`.
    """
    attn, ffn = f"{label}.attn", f"{label}.ffn"
    mixed, mixed_ffn = coefficients(s, attn), coefficients(s, ffn)
    x, x_q8 = sublayer_input(s, attn, streams, f"{weights}.attn_norm")
    out = attention(x, x_q8, partial(mix, s, attn, f"{weights}.hc_attn", streams.x, mixed))
    middle = expand(s, attn, out, streams.x, mixed, f"{attn}.X")
    x, x_q8 = sublayer_input(s, ffn, Streams(middle, mixed.pre), f"{weights}.ffn_norm")
    meanwhile = partial(mix, s, ffn, f"{weights}.hc_ffn", middle, mixed_ffn)
    out = moe(s, ffn, f"{weights}.ffn", x, x_q8, *experts, meanwhile)
    return Streams(expand(s, ffn, out, middle, mixed_ffn, f"{label}.X"), mixed_ffn.pre)


def coefficients(s: Scope, label: str) -> Mixed:
    """Where `mix` puts its results."""
    hc = s.model.hc
    shapes = {"pre": (hc,), "post": (hc,), "comb": (hc, hc)}
    return Mixed(*(s.out(f"{label}.{name}", shape, "f32") for name, shape in shapes.items()))


def mix(s: Scope, label: str, weights: str, x: Ref, mixed: Mixed) -> None:
    """Hyper-connection coefficients from the streams before a sub-layer, beside the node in front:
    nothing needs them before the sub-layer ends. `weights` names `..._fn/_scale/_base`.
    """
    m, count = s.model, 2 * s.model.hc + s.model.hc**2
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
    s.b.add(f"{label}.mix", op, beside=True)


def sublayer_input(s: Scope, label: str, streams: Streams, norm: str) -> tuple[Ref, Ref]:
    """Collapse the copies with the weights from one sub-layer ago, then norm: [T, D], and its Q8
    copy.
    """
    y, y_q8 = (s.out(f"{label}_{name}", (s.model.hidden,)) for name in ("in", "in_q8"))
    weight = s.b.weight(norm, (s.model.hidden,), "bf16")
    s.b.add(f"{label}.in", HcIn(streams.x, streams.pre, weight, y, y_q8, s.model.norm_eps))
    return y, y_q8


def expand(s: Scope, label: str, out: Ref, x: Ref, mixed: Mixed, name: str) -> Ref:
    """The sub-layer's result back into the copies; the new streams are called `name`."""
    y = s.out(name, x.shape[1:])
    s.b.add(f"{label}.expand", HcExpand(out, x, mixed.post, mixed.comb, y))
    return y
