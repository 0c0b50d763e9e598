"""Hyper-connection coefficients of a sub-layer (model.md 4.2, `Mix`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from ultraflash.graphs.capacity import MAX_ROWS
from ultraflash.graphs.numerics import F32, F64, mean_square, sigmoid
from ultraflash.graphs.plan import Geometry, Op, Ref

_CTAS, _MANY = 8, 16  # of a cluster; rows of one where there are many


def split_mixes(
    mixes: F32, scale: F32, base: F32, copies: int, iterations: int, eps: float
) -> tuple[F32, F32, F32]:
    """Coefficients from the 2C + C*C projected values: pre [T, C], post [T, C], comb [T, C, C]."""
    c = copies
    pre = sigmoid(mixes[:, :c] * scale[0] + base[:c]) + np.float32(eps)
    post = np.float32(2) * sigmoid(mixes[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    comb = (mixes[:, 2 * c :] * scale[2] + base[2 * c :]).reshape(-1, c, c)
    return pre, post, sinkhorn(comb, iterations, np.float32(eps))


def sinkhorn(comb: F32, iterations: int, eps: np.float32) -> F32:
    """Row softmax, then alternate column and row normalisation; `iterations` column steps in all.
    [T, C, C].
    """
    # Copies go first: sums of C terms over a leading axis add in order, and stay vectorised over
    # rows.
    m = np.ascontiguousarray(comb.transpose(1, 2, 0))
    m = np.exp(m - m.max(axis=1, keepdims=True))
    m = m / m.sum(axis=1, keepdims=True) + eps
    for step in range(2 * iterations - 1):
        m /= m.sum(axis=step % 2, keepdims=True) + eps
    return np.ascontiguousarray(m.transpose(2, 0, 1))


@dataclass(frozen=True)
class HcMix(Op):
    """How the streams enter the next but one collapse (pre), and how a sub-layer's result enters
    them (post, comb).

    Shapes:
        x: [T, C, D] bf16; fn: [2C + C*C, C*D] f32; scale: [3] f32; base: [2C + C*C] f32; pre, post:
        [T, C] f32; comb: [T, C, C] f32.
    """

    OUT: ClassVar[tuple[str, ...]] = ("pre", "post", "comb")
    x: Ref
    fn: Ref
    scale: Ref
    base: Ref
    pre: Ref
    post: Ref
    comb: Ref
    iterations: int
    eps: float
    norm_eps: float

    @staticmethod
    def reference(
        x: F32, fn: F64, scale: F32, base: F32, iterations: int, eps: float, norm_eps: float
    ) -> tuple[F32, F32, F32]:
        """Projection in float64; the norm factor multiplies the projection, not the input."""
        flat = x.reshape(len(x), -1)
        inverse = np.float32(1) / np.sqrt(mean_square(flat) + np.float32(norm_eps))
        mixes = (flat.astype(np.float64) @ fn.T).astype(np.float32) * inverse[:, None]
        return split_mixes(mixes, scale, base, x.shape[1], iterations, eps)

    def geometry(self) -> Geometry:
        """A cluster of 8 CTAs for each row of a step, for each 16 rows of a prompt."""
        rows, sizes = self.x.shape[0], self.variant()
        return Geometry(_CTAS * -(-rows // sizes["ROWS"]), threads=sizes["THREADS"])

    def variant(self) -> dict[str, int]:
        """Rows of a cluster, threads of a CTA: a warp for each sum of one row, or for each row."""
        many = self.x.shape[0] > MAX_ROWS
        threads = 32 * (_MANY if many else self.fn.shape[0] + 1)
        return {"ROWS": _MANY if many else 1, "THREADS": threads}

    def flops(self) -> int:
        """The projection."""
        return 2 * self.x.shape[0] * prod(self.fn.shape)
