"""The window key-value row of a token (model.md 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ultraflash.graphs.numerics import F32, U8, q8
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.plan import Op, Ref


@dataclass(frozen=True)
class WindowKv(Op):
    """Rotate the normed row and store it as Q8 codes and scales.

    Shapes:
        x: [T, E] bf16; cos, sin: [T, rope/2] f32; codes: [T, E] u8 (E4M3); scales: [T, E/32] u8
        (E8M0).
    """

    OUT: ClassVar[tuple[str, ...]] = ("codes", "scales")
    x: Ref
    cos: Ref
    sin: Ref
    codes: Ref
    scales: Ref

    @staticmethod
    def reference(x: F32, cos: F32, sin: F32) -> tuple[U8, U8]:
        """Bit-exact given the rotated bf16 values."""
        return q8(rotate(x, cos, sin))
