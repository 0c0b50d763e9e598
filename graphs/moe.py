"""The expert sub-layer as nodes (model.md section 4.7)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ultraflash.graphs.ops.expert_rows import ExpertRows, num_chunks
from ultraflash.graphs.ops.experts_down import ExpertsDown
from ultraflash.graphs.ops.experts_up import ExpertsUp, wide_rows
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.moe_sum import MoeSum
from ultraflash.graphs.ops.swiglu import Swiglu
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Scope


def moe(
    s: Scope, label: str, weights: str, x: Ref, x_q8: Ref, experts: int, active: int,
    meanwhile: Callable[[], None],
) -> Ref:  # fmt: skip
    """Routed and shared experts. [T, D] bf16 and its Q8 copy -> [T, D] bf16.

    `meanwhile` appends a node that may run beside any other here. With several ranks each holds a
    slice of every expert's width, and the per-expert rounding to bf16 falls away: ranks exchange
    fp32 partial sums (architecture.md section 4).
    """
    m, world1 = s.model, s.b.world == 1
    width = s.split(m.expert_width)
    ids, weight = (
        s.out(f"{label}.expert_ids", (active,), "i32"),
        s.out(f"{label}.expert_w", (active,), "f32"),
    )
    logits = s.linear(f"{label}.gate_logits", x, f"{weights}.gate", experts, "bf16", "f32")
    shared = SharedExpert(s, label, f"{weights}.shared_experts", x_q8, width)
    bias, bias_image = (
        s.b.weight(f"{weights}.gate.{n}", (experts,), "f32") for n in ("bias", "bias_vl")
    )
    s.b.add(
        f"{label}.gate",
        Gate(
            logits, bias, bias_image, s.io.is_image, s.io.slot, ids, weight, active, m.route_scale
        ),
    )
    shared.activate()
    z = s.out(f"{label}.z", (active, width))
    w1, w3 = (
        s.b.weight(f"{weights}.experts.{n}", (experts, width, m.hidden), "fp4")
        for n in ("w1", "w3")
    )
    order, chunks = expert_rows(s, label, ids, experts)
    s.b.add(f"{label}.up", ExpertsUp(x_q8, ids, weight, w1, w3, z, m.swiglu_limit, order, chunks))
    shared_out = shared.down()
    meanwhile()
    w2 = s.b.weight(f"{weights}.experts.w2", (experts, m.hidden, width), "fp4")
    routed = s.out(f"{label}.routed", (active, m.hidden), s.partial)
    z_q8 = s.quant8(f"{label}.z_q8", z)
    s.b.add(f"{label}.down", ExpertsDown(z_q8, ids, w2, routed, world1, order, chunks))
    part = s.out(s.part_name(f"{label}_out"), (m.hidden,), s.partial)
    s.b.add(f"{label}.sum", MoeSum(routed, shared_out, part, rounded=world1))
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


class SharedExpert:
    """The expert that serves every row, each step of it beside what leads to the routed ones."""

    def __init__(self, s: Scope, label: str, weights: str, x_q8: Ref, width: int) -> None:
        """Append its first two products, beside the gate's."""
        self._s, self._label, self._weights = s, label, weights
        self._gate, self._up = (
            s.linear(f"{label}.shared_{n}", x_q8, f"{weights}.{n}", width, "fp8", beside=True)
            for n in ("w1", "w3")
        )
        self._z_q8 = s.out(f"{label}.shared_z_q8", (width,))

    def activate(self) -> None:
        """Append the activation, beside the gate's choice."""
        op = Swiglu(self._gate, self._up, self._z_q8, self._s.model.swiglu_limit)
        self._s.b.add(f"{self._label}.shared_act", op, beside=True)

    def down(self) -> Ref:
        """Append the last product, beside the routed experts' first: [T, D] bf16, or this rank's
        part in f32.
        """
        s, name = self._s, f"{self._label}.shared_w2"
        weight, size = f"{self._weights}.w2", s.model.hidden
        return s.linear(name, self._z_q8, weight, size, "fp8", s.partial, beside=True)
