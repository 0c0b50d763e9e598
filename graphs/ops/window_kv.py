"""The window key-value row of a token (model.md 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ultraflash.graphs.numerics import F32, U8, q8, rms_norm
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.plan import Geometry, Op, Ref


@dataclass(frozen=True)
class WindowKv(Op):
    """Norm the row, rotate it and store it as Q8 codes and scales.

    Shapes:
        x: [T, E] bf16; weight: [E] bf16, of the norm; cos, sin: [T, rope/2] f32; codes: [T, E] u8
        (E4M3); scales: [T, E/32] u8 (E8M0).
    """

    OUT: ClassVar[tuple[str, ...]] = ("codes", "scales")
    x: Ref
    weight: Ref
    cos: Ref
    sin: Ref
    codes: Ref
    scales: Ref
    eps: float

    @staticmethod
    def reference(x: F32, weight: F32, cos: F32, sin: F32, eps: float) -> tuple[U8, U8]:
        """Bit-exact given the normed bf16 values."""
        return q8(rotate(rms_norm(x, weight, eps), cos, sin))

    def geometry(self) -> Geometry:
        """A CTA a row, a thread a pair of elements."""
        return Geometry(self.x.shape[0], threads=-(-self.x.shape[1] // 64) * 32)
