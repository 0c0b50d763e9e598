"""The expert sub-layer as nodes (model.md section 4.7)."""

from __future__ import annotations

from math import prod

from ultraflash.graphs.ops.expert_rows import ExpertRows, num_chunks
from ultraflash.graphs.ops.experts_down import ExpertsDown
from ultraflash.graphs.ops.experts_up import ExpertsUp, wide_rows
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.moe_sum import MoeSum
from ultraflash.graphs.ops.swiglu import Swiglu
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Scope


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
    logits = s.linear(f"{label}.gate_logits", x, f"{weights}.gate", experts, "bf16", "f32")
    bias, bias_image = (
        s.b.weight(f"{weights}.gate.{n}", (experts,), "f32") for n in ("bias", "bias_vl")
    )
    s.b.add(
        f"{label}.gate",
        Gate(
            logits, bias, bias_image, s.io.is_image, s.io.slot, ids, weight, active, m.route_scale
        ),
    )
    x_q8 = s.quant8(f"{label}_in_q8", x)
    z = s.out(f"{label}.z", (active, width))
    w1, w3 = (
        s.b.weight(f"{weights}.experts.{n}", (experts, width, m.hidden), "fp4")
        for n in ("w1", "w3")
    )
    order, chunks = expert_rows(s, label, ids, experts)
    s.b.add(f"{label}.up", ExpertsUp(x_q8, ids, weight, w1, w3, z, m.swiglu_limit, order, chunks))
    w2 = s.b.weight(f"{weights}.experts.w2", (experts, m.hidden, width), "fp4")
    routed = s.out(f"{label}.routed", (active, m.hidden), s.partial)
    z_q8 = s.quant8(f"{label}.z_q8", z)
    s.b.add(f"{label}.down", ExpertsDown(z_q8, ids, w2, routed, world1, order, chunks))
    shared = shared_expert(s, label, f"{weights}.shared_experts", x_q8, width)
    part = s.out(s.part_name(f"{label}_out"), (m.hidden,), s.partial)
    s.b.add(f"{label}.sum", MoeSum(routed, shared, part, rounded=world1))
    return s.reduce(f"{label}_out", part)


def expert_rows(
    s: Scope, label: str, ids: Ref, experts: int
) -> tuple[Ref, Ref] | tuple[None, None]:
    """Rows sorted by expert, where so many are chosen that it pays: order and chunks."""
    pairs = prod(ids.shape)
    rows = wide_rows(pairs, experts)
    if rows is None:
        return None, None
    order = s.b.scratch(f"{label}.order", (pairs,), "i32")
    chunks = s.b.scratch(f"{label}.chunks", (num_chunks(pairs, experts, rows), 3), "i32")
    s.b.add(f"{label}.rows", ExpertRows(ids, order, chunks, experts, rows))
    return order, chunks


def shared_expert(s: Scope, label: str, weights: str, x_q8: Ref, width: int) -> Ref:
    """The expert that serves every row. [T, D] bf16, or this rank's part in f32."""
    gate, up = (
        s.linear(f"{label}.shared_{n}", x_q8, f"{weights}.{n}", width, "fp8") for n in ("w1", "w3")
    )
    z = s.out(f"{label}.shared_z", (width,))
    s.b.add(f"{label}.shared_act", Swiglu(gate, up, z, s.model.swiglu_limit))
    z_q8 = s.quant8(f"{label}.shared_z_q8", z)
    return s.linear(f"{label}.shared_w2", z_q8, f"{weights}.w2", s.model.hidden, "fp8", s.partial)
