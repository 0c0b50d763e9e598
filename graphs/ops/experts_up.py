"""First half of the routed experts (model.md 4.7)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, F64, round_bf16, to_bf16
from ultraflash.graphs.ops.swiglu import swiglu
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class ExpertsUp(Op):
    """z = bf16(weight * swiglu(x w1, x w3)) of each chosen expert: the routing weight goes in
    before the rounding.

    Shapes:
        x: [T, D] bf16 through Q8; ids: [T, k] i32; weight: [T, k] f32; w1, w3: [N, F, D] fp4; y:
        [T, k, F] bf16.
    """

    x: Ref
    ids: Ref
    weight: Ref
    w1: Ref
    w3: Ref
    y: Ref
    limit: float

    @staticmethod
    def reference(x: F32, ids: I32, weight: F32, w1: F64, w3: F64, limit: float) -> F32:
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
        """A warp an output of one row and expert."""
        return Geometry(-(-self.w1.shape[1] // 4), prod(self.ids.shape), threads=128)

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
