"""Gated Engram values enter the residual streams (model.md 4.3, module)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32, mean_square, sigmoid, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class EngramMix(Op):
    """x_c + g_c * v, the gate of each copy from the similarity of stream and key; image rows pass
    unchanged.

    Shapes:
        x, y: [T, C, D] bf16; kv: [T, (C+1)*D] bf16: C keys, then the value; q_weight, k_weight: [C,
        D] bf16; is_image: [T] i32.
    """

    x: Ref
    kv: Ref
    q_weight: Ref
    k_weight: Ref
    is_image: Ref
    y: Ref
    eps: float

    @staticmethod
    def reference(x: F32, kv: F32, q_weight: F32, k_weight: F32, is_image: I32, eps: float) -> F32:
        """Similarity summed in float64, the rest in float32."""
        rows, copies, hidden = x.shape
        key = kv[:, : copies * hidden].reshape(rows, copies, hidden)
        value = kv[:, None, copies * hidden :]
        weight = (q_weight * k_weight).astype(np.float64)
        similarity = np.einsum(
            "tcd,cd,tcd->tc", x.astype(np.float64), weight, key.astype(np.float64)
        )
        one, small = np.float32(1), np.float32(eps)
        dot = similarity.astype(np.float32)
        dot = (
            dot
            * (one / np.sqrt(mean_square(x) + small))
            * (one / np.sqrt(mean_square(key) + small))
        )
        dot = dot * np.float32(hidden**-0.5)
        gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), np.float32(1e-6))), dot))
        gate = np.where(is_image[:, None] > 0, np.float32(0), gate)
        return to_bf16(x + gate[:, :, None] * value)

    def geometry(self) -> Geometry:
        """A CTA a copy."""
        return Geometry(self.x.shape[1], self.x.shape[0])
