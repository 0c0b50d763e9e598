"""RMS normalisation (model.md 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32, fake_q8, rms_norm
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class RmsNorm(Op):
    """y = bf16(w * (x * rsqrt(mean(x^2) + eps))), each row alone; with `q8` the Q8 of that.

    Shapes:
        x, y: [T, K] bf16, K a multiple of 32; weight: [K] bf16.
    """

    x: Ref
    weight: Ref
    y: Ref
    eps: float
    q8: bool = False

    @staticmethod
    def reference(x: F32, weight: F32, eps: float, q8: bool = False) -> F32:
        """Mean of squares in float64, the rest in float32."""
        y = rms_norm(x, weight, eps)
        return fake_q8(y) if q8 else y

    def geometry(self) -> Geometry:
        """A CTA a row, two elements a thread where they are not too many."""
        pairs = self.x.shape[-1] // 2
        return Geometry(self.x.shape[0], threads=min(1024, -(-pairs // 32) * 32))
