"""Cosines and sines of this step's positions (model.md 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class RopeTable(Op):
    """cos and sin of f32(position * frequency), for rows at `position + offset`.

    The product is rounded to float32 before the cosine: near a million positions this decides the
    angle.

    Shapes:
        position: [T] i32; freq: [rope/2] f32; cos, sin: [T, rope/2] f32.
    """

    OUT: ClassVar[tuple[str, ...]] = ("cos", "sin")
    position: Ref
    freq: Ref
    cos: Ref
    sin: Ref
    offset: int

    @staticmethod
    def reference(position: I32, freq: F32, offset: int) -> tuple[F32, F32]:
        """Angles in float32, functions in float64 rounded once."""
        angle = ((position + offset).astype(np.float32)[:, None] * freq).astype(np.float64)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
