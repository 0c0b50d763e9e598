"""Matrix products: every linear of the model is this one contract (model.md 3.2, architecture.md
4). On a device `w` lies in tiles of 16 columns of y by 32 of K (runtime/weights/layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, F64, round_bf16
from ultraflash.graphs.plan import Geometry, Op, Ref

_CTAS = 132  # that run at once on an H200, one on each SM
_SHARED = 200 << 10  # bytes of a CTA, of 227 that there are
_PIECES = {"fp8": 1, "bf16": 2}  # of 16 bytes that a lane has of a tile
_WIDE_CTAS = 40  # of the kernel for many rows: fewer leave most of a GPU idle
# Of the kernel for few rows:
_UNDER_WAY = 20  # tiles along K
_AT_ONCE = 5  # tiles whose products a warp mixes; fewer rows leave it the registers
_EXTRA = 0.3  # what a group of tiles costs beside its tiles, in tiles
_AHEAD = 2  # stages of weights that are asked for before earlier kernels are done


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
        return Geometry(spread.x, spread.y, spread.threads, spread.shared)

    def variant(self) -> dict[str, int]:
        """Which of the two kernels, and its sizes."""
        spread = self._spread()
        return {
            "FEW": int(spread.few),
            "THREADS": spread.threads,
            "M_TILES": spread.m_tiles,
            "N_TILES": spread.n_tiles,
            "UNROLL": spread.unroll,
            "DEPTH": spread.depth,
            "AHEAD": min(_AHEAD, spread.depth - 1),
            "PARTS": _parts(self.w),
        }

    def _spread(self) -> _Spread:
        size, columns = self.w.shape
        assert columns % 32 == 0, f"{self.w} has a row that is not made of whole tiles"
        assert self.groups == 1 or size % (32 * self.groups) == 0, (
            f"{self.w} has tiles in two groups"
        )
        wide = self.groups * _cover(size // self.groups, 128), _cover(self.x.shape[0], 128)
        if self.x.shape[0] > 16 and prod(wide) >= _WIDE_CTAS:
            stage = 16 * (8 * 2 * _PIECES[self.w.dtype] * 32 + 128 * 8)
            return _Spread(False, *wide, 256, 1, 1, 1, 4, 4 * stage)
        return _few(self.x.shape[0], self.w, self.groups)

    def flops(self) -> int:
        """Two a weight and row."""
        return 2 * self.x.shape[0] * prod(self.w.shape)


@dataclass(frozen=True)
class _Spread:
    """Grid, compile-time sizes and shared bytes of a launch."""

    few: bool
    x: int
    y: int
    threads: int
    m_tiles: int
    n_tiles: int
    unroll: int
    depth: int
    shared: int


def _parts(w: Ref) -> int:
    """Into how many parts a sum falls: more where a CTA has one tile only, so that its warps share
    a latency.

    It follows from the weight alone: a row's bits do not depend on how many rows there are.
    """
    return 16 if _cover(w.shape[0], 16) <= _CTAS else 8


def _few(rows: int, w: Ref, groups: int) -> _Spread:
    """As many tiles at a time as give the busiest CTA the least to do."""
    tiles, parts = _cover(w.shape[0], 16), _parts(w)
    n_tiles = next(n for n in (1, 2, 4) if rows <= 8 * n or n == 4)
    y = _cover(rows, 8 * n_tiles)

    def shared(m: int, under_way: int) -> int:
        """Bytes for all threads: operands under way, and a group's sums."""
        operands = (m * _PIECES[w.dtype] + n_tiles) * under_way
        return 32 * parts * 16 * (operands + m * n_tiles)

    def busiest(m: int) -> float:
        return _cover(_cover(tiles, m) * y, _CTAS) * (m + _EXTRA)

    def fits(m: int) -> bool:
        """Sums into registers, operands into shared memory, a group of `w` into tiles."""
        whole = groups == 1 or tiles // groups % m == 0
        return whole and m * n_tiles * parts <= 64 and shared(m, 2) <= _SHARED

    m_tiles = min((m for m in (4, 3, 2, 1) if fits(m)), key=busiest)
    x = min(_cover(tiles, m_tiles), max(1, _CTAS // y))
    part = _cover(w.shape[1], 32 * parts)
    even = min(part, 32)  # scales are handed out 32 at a time
    few = range(1, max(1, _AT_ONCE // (m_tiles if n_tiles < 4 else 4)) + 1)
    unroll = max(u for u in few if even % u == 0 and shared(m_tiles, 2 * u) <= _SHARED)
    wanted = min(_UNDER_WAY, part * _cover(tiles, m_tiles * x))
    most = range(2, max(2, _cover(wanted, unroll)) + 1)
    depth = max(d for d in most if shared(m_tiles, d * unroll) <= _SHARED)
    size = shared(m_tiles, depth * unroll)
    return _Spread(True, x, y, 32 * parts, m_tiles, n_tiles, unroll, depth, size)


def _cover(size: int, step: int) -> int:
    """How many steps cover a size."""
    return -(-size // step)
