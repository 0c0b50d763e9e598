"""Index queries: rotated and quantised like the keys that they meet (model.md 4.6)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32, qmx4, qmx4_decode
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.plan import Op, Ref


@dataclass(frozen=True)
class IndexQuery(Op):
    """y = QMX4 of the rotated query, as exact bf16 values.

    Shapes:
        x: [T, Hi*I] bf16; cos, sin: [T, rope/2] f32; y: [T, Hi, I] bf16.
    """

    x: Ref
    cos: Ref
    sin: Ref
    y: Ref
    heads: int

    @staticmethod
    def reference(x: F32, cos: F32, sin: F32, heads: int) -> F32:
        """Bit-exact given the rotated bf16 values."""
        return qmx4_decode(*qmx4(rotate(x.reshape(len(x), heads, -1), cos, sin)))
