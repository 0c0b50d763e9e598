"""First half of the routed experts (model.md 4.7); and how both halves are spread over a device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, F64, round_bf16, to_bf16
from ultraflash.graphs.ops.swiglu import swiglu
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32

# Constants of ptx/uf/experts.cuh and experts_wide.cuh, where they are explained.
_LONG, _PARTS = 64 * 32, 8
_SLAB = 2 * (512 + 128)
_NARROW_WARPS, _NARROW_PAIRS, _NARROW_BYTES = 4, 2048, 4 * (_SLAB + 512)
# Rows of an expert that a CTA takes at once where there are many: its warps, stages of its ring,
# CTAs that fill an SM. More rows share a weight's conversion, fewer leave registers to more warps.
_WIDE = {32: (3, 5, 4), 64: (4, 5, 2)}


def wide_rows(pairs: int, experts: int) -> int | None:
    """Rows of an expert that kernels take at once if so many pairs of rows and experts come in
    chunks (`ExpertRows`); None: so few, 4 an expert, that kernels find them in `ids` themselves.
    """
    if pairs <= min(4 * experts, _NARROW_PAIRS):
        return None
    return 32 if pairs <= 32 * experts else 64


def experts_geometry(ids: Ref, units: int, weights: Ref, chunks: Ref | None) -> Geometry:
    """CTAs for `units` of 64 rows of an expert's matrices.

    Few pairs: along y one for each, of which the first of an expert does the work of all. Long
    sums fall into parts, a warp each.
    """
    parts = _PARTS if weights.shape[2] >= _LONG else 1
    if chunks is None:
        warps = max(_NARROW_WARPS, parts)
        return Geometry(
            -(-units * parts // warps), prod(ids.shape), 32 * warps, warps * _NARROW_BYTES
        )
    rows = wide_rows(prod(ids.shape), weights.shape[0])
    assert rows, f"{ids} has so few pairs that no kernel takes chunks of them"
    warps, stages, _ = _WIDE[rows]
    shared = stages * (rows * 64 + warps * _SLAB) + (warps * rows * 256 if parts > 1 else 0)
    return Geometry(-(-units // warps), chunks.shape[0], 32 * warps, shared)


def experts_variant(ids: Ref, weights: Ref, threads: int) -> dict[str, int]:
    """How many threads and CTAs share an SM's registers; of many rows, what a CTA takes at once."""
    rows = wide_rows(prod(ids.shape), weights.shape[0])
    if rows is None:
        return {"THREADS": threads, "CTAS": 512 // threads}
    _, stages, ctas = _WIDE[rows]
    return {"THREADS": threads, "CTAS": ctas, "WIDE": rows, "STAGES": stages}


@dataclass(frozen=True)
class ExpertsUp(Op):
    """z = bf16(weight * swiglu(x w1, x w3)) of each chosen expert: the routing weight goes in
    before the rounding.

    Shapes:
        x: [T, D] bf16 through Q8; ids: [T, k] i32; weight: [T, k] f32; w1, w3: [N, F, D] fp4; y:
        [T, k, F] bf16. order: [T*k] i32 and chunks: [C, 3] i32 of `ExpertRows`, both or none: how
        a kernel finds the rows of an expert, which changes nothing of what it computes.
    """

    x: Ref
    ids: Ref
    weight: Ref
    w1: Ref
    w3: Ref
    y: Ref
    limit: float
    order: Ref | None = None
    chunks: Ref | None = None

    @staticmethod
    def reference(
        x: F32, ids: I32, weight: F32, w1: F64, w3: F64, limit: float,
        order: I32 | None = None, chunks: I32 | None = None,
    ) -> F32:  # fmt: skip
        """One product an expert, over the rows that chose it."""
        wide = x.astype(np.float64)
        y = np.empty((*ids.shape, w1.shape[1]), np.float32)
        for expert in np.unique(ids).tolist():
            rows, places = np.nonzero(ids == expert)
            gate = round_bf16(wide[rows] @ w1[expert].T)
            up = round_bf16(wide[rows] @ w3[expert].T)
            y[rows, places] = to_bf16(weight[rows, places, None] * swiglu(gate, up, limit))
        return y

    def geometry(self) -> Geometry:
        """A unit is 32 gates and their 32 ups."""
        return experts_geometry(self.ids, -(-self.w1.shape[1] // 32), self.w1, self.chunks)

    def variant(self) -> dict[str, int]:
        """As `experts_variant` says."""
        return experts_variant(self.ids, self.w1, self.geometry().threads)

    def cost(self) -> Cost:
        """Weights of as many experts as can be distinct at most."""
        return experts_cost(self.ids, (self.w1, self.w3), self.x.nbytes + self.y.nbytes)


def experts_cost(ids: Ref, weights: tuple[Ref, ...], activations: int) -> Cost:
    """Bytes of the experts that `ids` can name at most, and their products."""
    rows, k = ids.shape
    experts = weights[0].shape[0]
    one = sum(w.nbytes for w in weights) // experts
    flops = sum(2 * rows * k * w.shape[1] * w.shape[2] for w in weights)
    return Cost(min(rows * k, experts) * one + activations, flops)
