"""The layers of the model as nodes (model.md sections 4.2 to 4.7): which operations, over which
buffers, in which order.

Functions take a `Scope`, append nodes and return the buffers that others need. Names:
`L{layer}.{part}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.io import Io
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.attention import Attention
from ultraflash.graphs.ops.comm import AllReduce
from ultraflash.graphs.ops.engram_gather import EngramGather
from ultraflash.graphs.ops.engram_hash import EngramHash
from ultraflash.graphs.ops.engram_mix import EngramMix
from ultraflash.graphs.ops.experts_down import ExpertsDown
from ultraflash.graphs.ops.experts_up import ExpertsUp
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.hc_expand import HcExpand
from ultraflash.graphs.ops.hc_mix import HcMix
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.ops.moe_sum import MoeSum
from ultraflash.graphs.ops.quant8 import Quant8
from ultraflash.graphs.ops.ring_write import RingWrite
from ultraflash.graphs.ops.rms_norm import RmsNorm
from ultraflash.graphs.ops.rope import Rope
from ultraflash.graphs.ops.rope_table import RopeTable
from ultraflash.graphs.ops.swiglu import Swiglu
from ultraflash.graphs.ops.window_kv import WindowKv
from ultraflash.graphs.plan import PlanBuilder, Ref


@dataclass(frozen=True)
class Angles:
    """cos and sin of one frequency table at this step's positions. [T, rope/2] f32 each."""

    cos: Ref
    sin: Ref


@dataclass(frozen=True)
class Scope:
    """What every layer function needs: where nodes go, sizes, io, and switches of the whole
    plan."""

    b: PlanBuilder
    model: Model
    capacity: Capacity
    io: Io
    round_attention: bool  # test switch: bf16 attention weights as in the model authors' kernel
    rows: int  # of new buffers: the plan's, or one a sequence behind the last layer of a prefill

    def split(self, size: int) -> int:
        """One rank's part of a size that is split over ranks."""
        return size // self.b.world

    def out(self, label: str, shape: tuple[int, ...], dtype: str = "bf16") -> Ref:
        """A scratch buffer of this step, [T, *shape]."""
        return self.b.scratch(label, (self.rows, *shape), dtype)

    def linear(
        self, label: str, x: Ref, weight: str, size: int, form: str, dtype: str = "bf16"
    ) -> Ref:
        """y = x @ weight.T, [T, size]."""
        y = self.out(label, (size,), dtype)
        w = self.b.weight(weight, (size, x.shape[-1]), form)
        self.b.add(label, Linear(x, w, y, rounded=dtype == "bf16"))
        return y

    def norm(self, label: str, x: Ref, weight: str) -> Ref:
        """RMS norm over the last axis."""
        y = self.out(label, x.shape[1:])
        self.b.add(
            label, RmsNorm(x, self.b.weight(weight, x.shape[-1:], "bf16"), y, self.model.norm_eps)
        )
        return y

    def quant8(self, label: str, x: Ref) -> Ref:
        """The Q8 copy that FP8 and FP4 linears read."""
        y = self.out(label, x.shape[1:])
        self.b.add(label, Quant8(x, y))
        return y

    def part_name(self, name: str) -> str:
        """What a sub-layer's last product is called: `name` itself unless ranks still have to
        add."""
        return name if self.b.world == 1 else f"{name}_part"

    def reduce(self, name: str, part: Ref) -> Ref:
        """The sum of all ranks' parts as bf16, called `name`; with one rank the part is that
        already."""
        if self.b.world == 1:
            return part
        y = self.out(name, part.shape[1:])
        self.b.add(name, AllReduce(part, y, rounded=True))
        return y

    @property
    def partial(self) -> str:
        """Type of a result that ranks still have to add."""
        return "bf16" if self.b.world == 1 else "f32"


@dataclass(frozen=True)
class Streams:
    """What passes from layer to layer: residual copies and the weights of the next collapse."""

    x: Ref  # [T, C, D] bf16
    pre: Ref  # [T, C] f32


def angles(s: Scope, label: str, table: str, offset: int = 0) -> Angles:
    """Angles of this step's positions (plus offset) under the frequency table `plain` or
    `compressed`."""
    half = s.model.rope_dim // 2
    cos, sin = s.out(f"{label}.cos", (half,), "f32"), s.out(f"{label}.sin", (half,), "f32")
    freq = s.b.weight(f"rope.{table}", (half,), "f32")
    s.b.add(label, RopeTable(s.io.position, freq, cos, sin, offset))
    return Angles(cos, sin)


@dataclass(frozen=True)
class Mixed:
    """Coefficients of one sub-layer."""

    pre: Ref
    post: Ref
    comb: Ref


def hc_mix(s: Scope, label: str, weights: str, x: Ref) -> Mixed:
    """Hyper-connection coefficients from the streams before a sub-layer; `weights` names
    `..._fn/_scale/_base`."""
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


def engram(s: Scope, layer: int, x: Ref, compressed_ids: Ref, history: Ref) -> Ref:
    """The Engram update of the streams in front of layer `layer`'s mix (model.md 4.3)."""
    m, io, label = s.model, s.io, f"L{layer}.engram"
    p = f"layers.{layer}.engram"
    columns, table_rows = m.engram_columns, m.engram_rows[m.engram_layers.index(layer)]
    rows = s.out(f"{label}.rows", (columns,), "i64")
    token_map = s.b.weight("engram.token_map", (m.vocab,), "i64")
    s.b.add(
        f"{label}.hash",
        EngramHash(
            compressed_ids,
            history,
            io.slot,
            io.position,
            io.row_start,
            token_map,
            s.b.weight(f"{p}.multipliers", (m.engram_max_order,), "i64"),
            s.b.weight(f"{p}.primes", (columns,), "i64"),
            s.b.weight(f"{p}.offsets", (columns,), "i64"),
            rows,
            m.engram_pad,
        ),
    )
    gathered = s.out(f"{label}.rows8", (columns * m.engram_dim,))
    table = s.b.weight(f"{p}.embed", (table_rows, m.engram_dim), "rows8")
    s.b.add(f"{label}.gather", EngramGather(rows, table, gathered))
    kv = s.linear(
        f"{label}.kv",
        s.quant8(f"{label}.rows_q8", gathered),
        f"{p}.wkv",
        (m.hc + 1) * m.hidden,
        "fp8",
    )
    y = s.out(f"{label}.x", x.shape[1:])
    q_weight, k_weight = (s.b.weight(f"{p}.{n}_weight", (m.hc, m.hidden), "bf16") for n in "qk")
    s.b.add(f"{label}.mix", EngramMix(x, kv, q_weight, k_weight, io.is_image, y, m.norm_eps))
    return y


@dataclass(frozen=True)
class GlobalKv:
    """What a layer of ratio > 0 attends to beyond its window: a source's entries and the latest
    selection."""

    codes: Ref  # [slots, entries, E/2] u8
    scales: Ref  # [slots, entries, E/16] u8
    sel: Ref  # [T, k] i32


def queries(s: Scope, label: str, weights: str, x_q8: Ref, at: Angles) -> tuple[Ref, Ref]:
    """Rotated heads [T, H, E] of this rank, and the quantised low-rank query [T, q_rank] they came
    from."""
    m = s.model
    low = s.norm(
        f"{label}.qr",
        s.linear(f"{label}.wq_a", x_q8, f"{weights}.wq_a", m.q_rank, "fp8"),
        f"{weights}.q_norm",
    )
    low_q8 = s.quant8(f"{label}.qr_q8", low)
    heads = s.split(m.heads)
    flat = s.linear(f"{label}.wq_b", low_q8, f"{weights}.wq_b", heads * m.head_dim, "fp8")
    q = s.out(f"{label}.q", (heads, m.head_dim))
    s.b.add(f"{label}.rope", Rope(flat, at.cos, at.sin, q, heads))
    return q, low_q8


def window_rows(s: Scope, label: str, weights: str, x_q8: Ref, at: Angles) -> tuple[Ref, Ref]:
    """This step's window key-value rows: codes [T, E] and scales [T, E/32]."""
    m = s.model
    row = s.norm(
        f"{label}.kv",
        s.linear(f"{label}.wkv", x_q8, f"{weights}.wkv", m.head_dim, "fp8"),
        f"{weights}.kv_norm",
    )
    codes, scales = (
        s.out(f"{label}.kv_codes", (m.head_dim,), "u8"),
        s.out(f"{label}.kv_scales", (m.head_dim // 32,), "u8"),
    )
    s.b.add(f"{label}.window_kv", WindowKv(row, at.cos, at.sin, codes, scales))
    return codes, scales


def write_ring(s: Scope, label: str, value: Ref, ring: Ref) -> None:
    """This step's rows enter a ring, after everybody has read it."""
    s.b.add(label, RingWrite(value, ring, s.io.slot, s.io.position, s.io.row_start))


def ring(s: Scope, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
    """A position-addressed ring, [slots, R, *shape]."""
    return s.b.state(name, (s.capacity.slots, s.capacity.ring(s.model), *shape), dtype)


def attend(
    s: Scope,
    label: str,
    weights: str,
    q: Ref,
    kv: tuple[Ref, Ref],
    entries: GlobalKv | None,
    at: Angles,
) -> Ref:
    """Attention over window and selection, then the output projection. [T, D] bf16."""
    m, io = s.model, s.io
    rings = (
        ring(s, f"{label}.ring_codes", kv[0].shape[1:], "u8"),
        ring(s, f"{label}.ring_scales", kv[1].shape[1:], "u8"),
    )
    o = s.out(f"{label}.o", (s.split(m.heads) * m.head_dim,))
    sink = s.b.weight(f"{weights}.attn_sink", (s.split(m.heads),), "f32")
    s.b.add(
        f"{label}.attend",
        Attention(
            q=q,
            codes=kv[0],
            scales=kv[1],
            ring_codes=rings[0],
            ring_scales=rings[1],
            main_codes=entries.codes if entries else None,
            main_scales=entries.scales if entries else None,
            sel=entries.sel if entries else None,
            sink=sink,
            cos=at.cos,
            sin=at.sin,
            slot=io.slot,
            position=io.position,
            row_start=io.row_start,
            window_start=io.window_start,
            y=o,
            window=m.window,
            round_weights=s.round_attention,
        ),
    )
    for value, into in zip(kv, rings, strict=True):
        write_ring(s, f"{label}.write", value, into)
    return output_projection(s, label, weights, o)


def output_projection(s: Scope, label: str, weights: str, o: Ref) -> Ref:
    """From this rank's heads [T, H*E] to the sub-layer's result [T, D] bf16 of all ranks."""
    m, groups = s.model, s.split(s.model.o_groups)
    low = s.out(f"{label}.wo_a", (groups * m.o_rank,))
    w = s.b.weight(f"{weights}.wo_a", (groups * m.o_rank, m.heads_per_group * m.head_dim), "fp8")
    s.b.add(f"{label}.wo_a", Linear(o, w, low, groups=groups))
    name, low_q8 = f"{label}_out", s.quant8(f"{label}.wo_a_q8", low)
    return s.reduce(
        name, s.linear(s.part_name(name), low_q8, f"{weights}.wo_b", m.hidden, "fp8", s.partial)
    )


def moe(s: Scope, label: str, weights: str, x: Ref, experts: int, active: int) -> Ref:
    """Routed and shared experts. [T, D] bf16 -> [T, D] bf16.

    With several ranks each holds a slice of every expert's width, and the per-expert rounding to
    bf16 falls away:
    ranks exchange fp32 partial sums (architecture.md section 4).
    """
    m, world1 = s.model, s.b.world == 1
    width = s.split(m.expert_width)
    ids, weight = (
        s.out(f"{label}.expert_ids", (active,), "i32"),
        s.out(f"{label}.expert_w", (active,), "f32"),
    )
    gate_w = s.b.weight(f"{weights}.gate", (experts, m.hidden), "bf16")
    bias, bias_image = (
        s.b.weight(f"{weights}.gate.{n}", (experts,), "f32") for n in ("bias", "bias_vl")
    )
    s.b.add(
        f"{label}.gate",
        Gate(x, gate_w, bias, bias_image, s.io.is_image, ids, weight, active, m.route_scale),
    )
    x_q8 = s.quant8(f"{label}_in_q8", x)
    z = s.out(f"{label}.z", (active, width))
    w1, w3 = (
        s.b.weight(f"{weights}.experts.{n}", (experts, width, m.hidden), "fp4")
        for n in ("w1", "w3")
    )
    s.b.add(f"{label}.up", ExpertsUp(x_q8, ids, weight, w1, w3, z, m.swiglu_limit))
    w2 = s.b.weight(f"{weights}.experts.w2", (experts, m.hidden, width), "fp4")
    routed = s.out(f"{label}.routed", (active, m.hidden), s.partial)
    s.b.add(
        f"{label}.down", ExpertsDown(s.quant8(f"{label}.z_q8", z), ids, w2, routed, rounded=world1)
    )
    shared = shared_expert(s, label, f"{weights}.shared_experts", x_q8, width)
    part = s.out(s.part_name(f"{label}_out"), (m.hidden,), s.partial)
    s.b.add(f"{label}.sum", MoeSum(routed, shared, part, rounded=world1))
    return s.reduce(f"{label}_out", part)


def shared_expert(s: Scope, label: str, weights: str, x_q8: Ref, width: int) -> Ref:
    """The expert that serves every row. [T, D] bf16, or this rank's part in f32."""
    gate, up = (
        s.linear(f"{label}.shared_{n}", x_q8, f"{weights}.{n}", width, "fp8") for n in ("w1", "w3")
    )
    z = s.out(f"{label}.shared_z", (width,))
    s.b.add(f"{label}.shared_act", Swiglu(gate, up, z, s.model.swiglu_limit))
    z_q8 = s.quant8(f"{label}.shared_z_q8", z)
    return s.linear(f"{label}.shared_w2", z_q8, f"{weights}.w2", s.model.hidden, "fp8", s.partial)
