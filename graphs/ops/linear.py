"""Matrix products: every linear of the model is this one contract (model.md 3.2, architecture.md
4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, F64, round_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref


_THREADS = 256
_CTAS = 132  # that run at once on an H200, one on each SM
_SHARED = 200 << 10  # bytes of a CTA, of 227 that there are
_DEPTH = 20  # tiles under way
_WIDE_CTAS = 40  # fewer leave most of a GPU idle


@dataclass(frozen=True)
class Linear(Op):
    """y = x @ w.T of the exactly dequantised operands, accumulated, rounded once to y's type.

    With `groups` > 1 the input falls into that many equal parts, each with its own rows of `w` (the
    output projection's first half). Partial sums of a split input are f32 and meet in an
    `AllReduce`.

    Shapes:
        x: [T, G*K] bf16 (already through Q8 where w is fp8); w: [N, K] fp8 | bf16, K a multiple of
        32, N of 32 G where G is above 1; y: [T, N] bf16 | f32.
    """

    x: Ref
    w: Ref
    y: Ref
    groups: int = 1
    rounded: bool = True  # to bf16; otherwise f32

    @staticmethod
    def reference(x: F32, w: F64, groups: int, rounded: bool) -> F32:
        """float64 sums: of operands this short they are exact or nearly so, in any order."""
        wide = x.astype(np.float64)
        if groups == 1:
            total = wide @ w.T
        else:
            parts = wide.reshape(len(x), groups, -1).transpose(1, 0, 2)
            split = w.reshape(groups, -1, w.shape[-1]).transpose(0, 2, 1)
            total = (parts @ split).transpose(1, 0, 2).reshape(len(x), -1)
        return round_bf16(total) if rounded else total.astype(np.float32)

    def geometry(self) -> Geometry:
        """Few rows: groups of tiles in turn, so many CTAs as run at once; a CTA for each 128 x 128
        outputs of many.
        """
        spread = self._spread()
        return Geometry(spread.x, spread.y, _THREADS, spread.shared)

    def variant(self) -> dict[str, int]:
        """Which of the two kernels, and its sizes."""
        spread = self._spread()
        return {
            "FEW": int(spread.few),
            "M_TILES": spread.m_tiles,
            "N_TILES": spread.n_tiles,
            "DEPTH": spread.depth,
        }

    def _spread(self) -> _Spread:
        size, columns = self.w.shape
        assert columns % 32 == 0, f"{self.w} has a row that is not made of whole tiles"
        assert self.groups == 1 or size % (32 * self.groups) == 0, (
            f"{self.w} has tiles in two groups"
        )
        pieces = {"fp8": 1, "bf16": 2}[self.w.dtype]
        wide = self.groups * -(-size // self.groups // 128), -(-self.x.shape[0] // 128)
        if self.x.shape[0] > 16 and prod(wide) >= _WIDE_CTAS:
            stage = 16 * (8 * 2 * pieces * 32 + 128 * 8)
            return _Spread(False, *wide, 0, 0, 4, 4 * stage)
        return _few(self.x.shape[0], -(-size // 16), self.groups, pieces)

    def flops(self) -> int:
        """Two a weight and row."""
        return 2 * self.x.shape[0] * prod(self.w.shape)


@dataclass(frozen=True)
class _Spread:
    """Grid, compile-time sizes and shared bytes of a launch."""

    few: bool
    x: int
    y: int
    m_tiles: int
    n_tiles: int
    depth: int
    shared: int


def _few(rows: int, tiles: int, groups: int, pieces: int) -> _Spread:
    """As many tiles at a time as give the busiest CTA the least to do."""
    n_tiles = next(n for n in (1, 2, 4) if rows <= 8 * n or n == 4)
    y = -(-rows // (8 * n_tiles))

    def busiest(m: int) -> int:
        return -(-(-(-tiles // m)) * y // _CTAS) * m

    fitting = [m for m in (4, 3, 2, 1) if groups == 1 or tiles // groups % m == 0]
    m_tiles = min(fitting, key=busiest)
    slot = _THREADS * 16 * (m_tiles * pieces + n_tiles)
    sums = _THREADS * 16 * m_tiles * n_tiles
    depth = min((_SHARED - sums) // slot, _DEPTH)
    x = min(-(-tiles // m_tiles), max(1, _CTAS // y))
    return _Spread(True, x, y, m_tiles, n_tiles, depth, depth * slot + sums)
