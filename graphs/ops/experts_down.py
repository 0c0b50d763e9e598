"""Second half of the routed experts (model.md 4.7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32, F64, round_bf16
from ultraflash.graphs.ops.experts_up import experts_cost, experts_geometry, experts_variant
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class ExpertsDown(Op):
    """Each chosen expert's output, rounded to bf16; with several ranks the local part in f32, not
    rounded.

    Shapes:
        z: [T, k, F] bf16 through Q8; ids: [T, k] i32; w2: [N, D, F] fp4; y: [T, k, D] bf16 | f32;
        order, chunks: as in `ExpertsUp`.
    """

    z: Ref
    ids: Ref
    w2: Ref
    y: Ref
    rounded: bool
    order: Ref | None = None
    chunks: Ref | None = None

    @staticmethod
    def reference(
        z: F32, ids: I32, w2: F64, rounded: bool,
        order: I32 | None = None, chunks: I32 | None = None,
    ) -> F32:  # fmt: skip
        """One product an expert, over the rows that chose it."""
        wide = z.astype(np.float64)
        y = np.empty((*ids.shape, w2.shape[1]), np.float32)
        for expert in np.unique(ids).tolist():
            rows, places = np.nonzero(ids == expert)
            out = wide[rows, places] @ w2[expert].T
            y[rows, places] = round_bf16(out) if rounded else out.astype(np.float32)
        return y

    def geometry(self) -> Geometry:
        """A unit is 64 outputs."""
        return experts_geometry(self.ids, -(-self.w2.shape[1] // 64), self.w2, self.chunks)

    def variant(self) -> dict[str, int]:
        """As `experts_variant` says."""
        return experts_variant(self.ids, self.w2, self.geometry().threads)

    def cost(self) -> Cost:
        """Weights of as many experts as can be distinct at most."""
        return experts_cost(self.ids, (self.w2,), self.z.nbytes + self.y.nbytes)
