"""Rotary embedding of the last dimensions of vectors (model.md 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotate the last 2*len(cos) elements of x pairwise (2j, 2j+1); inverse with -sin. bf16 in,
    bf16 out.

    Shapes:
        x: [T, ..., dims]; cos, sin: [T, pairs]; one angle a row, shared by all axes in between.
    """
    pairs = cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (pairs,)
    c, s = cos.reshape(shape), sin.reshape(shape)
    even, odd = x[..., -2 * pairs :: 2], x[..., 1 - 2 * pairs :: 2]
    turned = np.empty((*x.shape[:-1], pairs, 2), np.float32)
    turned[..., 0] = even * c - odd * s
    turned[..., 1] = even * s + odd * c
    y = x.copy()
    y[..., -2 * pairs :] = to_bf16(turned).reshape(*x.shape[:-1], 2 * pairs)
    return y


@dataclass(frozen=True)
class Rope(Op):
    """Rotate the last dimensions of every head.

    Shapes:
        x: [T, H*E] bf16; cos, sin: [T, rope/2] f32; y: [T, H, E] bf16.
    """

    x: Ref
    cos: Ref
    sin: Ref
    y: Ref
    heads: int

    @staticmethod
    def reference(x: F32, cos: F32, sin: F32, heads: int) -> F32:
        """float32 inside, rounded to bf16."""
        return rotate(x.reshape(len(x), heads, -1), cos, sin)

    def geometry(self) -> Geometry:
        """Rows, and a thread for every two elements of one."""
        rows, heads, dim = self.y.shape
        return Geometry(rows, -(-heads * dim // 512))
