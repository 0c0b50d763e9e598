"""What a sub-layer sees of the residual streams (model.md 4.2, `Collapse`, then RN and Q8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ultraflash.graphs.numerics import F32, fake_q8, rms_norm
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.rms_norm import row_threads
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class HcIn(Op):
    """The weighted sum of the copies, normed; and the Q8 of that, which FP8 and FP4 linears read.

    Shapes:
        x: [T, C, D] bf16, D a multiple of 32, at most 8,192; pre: [T, C] f32; weight: [D] bf16, of
        the norm; y, y_q8: [T, D] bf16.
    """

    OUT: ClassVar[tuple[str, ...]] = ("y", "y_q8")
    x: Ref
    pre: Ref
    weight: Ref
    y: Ref
    y_q8: Ref
    eps: float

    @staticmethod
    def reference(x: F32, pre: F32, weight: F32, eps: float) -> tuple[F32, F32]:
        """The sum in float32, copies in order, rounded to bf16; the norm as `RmsNorm` has it."""
        y = rms_norm(HcCollapse.reference(x, pre), weight, eps)
        return y, fake_q8(y)

    def geometry(self) -> Geometry:
        """A CTA a row."""
        return Geometry(self.x.shape[0], threads=row_threads(self.x))

    def variant(self) -> dict[str, int]:
        """Copies, so that all of them are read at once."""
        return {"COPIES": self.x.shape[1]}
