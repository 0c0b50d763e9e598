"""RMS normalisation (model.md 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32, fake_q8, rms_norm
from ultraflash.graphs.plan import Geometry, Op, Ref

_MOST_THREADS = 1024
_PAIRS = 4  # of elements, that a thread keeps


def row_threads(x: Ref) -> int:
    """Threads that norm a row of x among them: some pairs each, warps whole."""
    pairs = x.shape[-1] // 2
    threads = min(_MOST_THREADS, -(-pairs // 32) * 32)
    if pairs > threads:
        threads = -(-pairs // (32 * _PAIRS)) * 32
    assert pairs <= _PAIRS * threads <= _PAIRS * _MOST_THREADS, f"no CTA can hold a row of {x}"
    return threads


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
        """A CTA a row."""
        return Geometry(self.x.shape[0], threads=row_threads(self.x))
