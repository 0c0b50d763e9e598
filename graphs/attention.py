"""The attention sub-layer as nodes (model.md section 4.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ultraflash.graphs.ops.attention import Attention
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.ops.rope import Rope
from ultraflash.graphs.ops.window_kv import WindowKv
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Angles, Scope, ring, write_rings


@dataclass(frozen=True)
class GlobalKv:
    """What a layer of ratio > 0 attends to beyond its window: a source's entries and the latest
    selection.
    """

    codes: Ref  # [slots, entries, E/2] u8
    scales: Ref  # [slots, entries, E/16] u8
    sel: Ref  # [T, k] i32


@dataclass(frozen=True)
class Projected:
    """What this step's rows ask, and what they add to the window."""

    q: Ref  # [T, H, E] bf16, rotated heads of this rank
    low_q8: Ref  # [T, q_rank] bf16, the low-rank query that they came from
    kv: tuple[Ref, Ref]  # codes [T, E] and scales [T, E/32]


def project(s: Scope, label: str, weights: str, x_q8: Ref, at: Angles) -> Projected:
    """Queries, and beside them the window's rows."""
    m = s.model
    low = s.linear(f"{label}.wq_a", x_q8, f"{weights}.wq_a", m.q_rank, "fp8")
    row = s.linear(f"{label}.wkv", x_q8, f"{weights}.wkv", m.head_dim, "fp8", beside=True)
    low_q8 = s.norm(f"{label}.qr_q8", low, f"{weights}.q_norm", q8=True)
    kv = window_rows(s, label, weights, row, at, beside=True)
    heads = s.split(m.heads)
    flat = s.linear(f"{label}.wq_b", low_q8, f"{weights}.wq_b", heads * m.head_dim, "fp8")
    q = s.out(f"{label}.q", (heads, m.head_dim))
    s.b.add(f"{label}.rope", Rope(flat, at.cos, at.sin, q, heads))
    return Projected(q, low_q8, kv)


def window_rows(
    s: Scope, label: str, weights: str, row: Ref, at: Angles, *, beside: bool = False
) -> tuple[Ref, Ref]:
    """Window key-value rows of projections [T, E]: codes [T, E] and scales [T, E/32]."""
    m = s.model
    norm = s.b.weight(f"{weights}.kv_norm", (m.head_dim,), "bf16")
    codes, scales = (
        s.out(f"{label}.kv_codes", (m.head_dim,), "u8"),
        s.out(f"{label}.kv_scales", (m.head_dim // 32,), "u8"),
    )
    op = WindowKv(row, norm, at.cos, at.sin, codes, scales, m.norm_eps)
    s.b.add(f"{label}.window_kv", op, beside=beside)
    return codes, scales


def attend(
    s: Scope,
    label: str,
    weights: str,
    q: Ref,
    kv: tuple[Ref, Ref],
    entries: GlobalKv | None,
    at: Angles,
    meanwhile: Callable[[], None],
) -> Ref:
    """Attention over window and selection, then the output projection. [T, D] bf16.

    `meanwhile` appends a node that may run beside attention.
    """
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
    meanwhile()
    return output_projection(s, label, weights, o, (kv, rings))


def output_projection(
    s: Scope, label: str, weights: str, o: Ref,
    kept: tuple[tuple[Ref, Ref], tuple[Ref, Ref]] | None = None,
) -> Ref:  # fmt: skip
    """From this rank's heads [T, H*E] to the sub-layer's result [T, D] bf16 of all ranks.

    `kept`: rows that enter rings meanwhile, attention having read these.
    """
    m, groups = s.model, s.split(s.model.o_groups)
    low = s.out(f"{label}.wo_a", (groups * m.o_rank,))
    w = s.b.weight(f"{weights}.wo_a", (groups * m.o_rank, m.heads_per_group * m.head_dim), "fp8")
    s.b.add(f"{label}.wo_a", Linear(o, w, low, groups=groups))
    if kept:
        write_rings(s, f"{label}.write", *kept, beside=True)
    name, low_q8 = f"{label}_out", s.quant8(f"{label}.wo_a_q8", low)
    return s.reduce(
        name, s.linear(s.part_name(name), low_q8, f"{weights}.wo_b", m.hidden, "fp8", s.partial)
    )
