"""How well each global entry answers a row's index query (model.md 4.6)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, F64, U8, qmx4_decode
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32

_COLUMNS = 256  # of a tile of rows
_BLOCK = 256  # entries that a CTA scores at once
_CTAS = 528  # four for each of 132 SMs


def pool_places(blocks: int, block_size: int, entries: int) -> int:
    """Places of a pool of `blocks` blocks over `entries` entries."""
    return min(blocks, -(-entries // block_size)) * block_size


def _scores(q: F32, heads: F64, codes: U8, scales: U8) -> F32:
    """Of rows [T, Hi, I] and keys [n, ...]: [T, n]."""
    keys = qmx4_decode(codes, scales).astype(np.float64)
    dots = np.maximum(q.astype(np.float64) @ keys.T, 0)
    score: F32 = np.einsum("tj,tjn->tn", heads, dots).astype(np.float32)
    return score


def _inside(
    q: F32, heads: F64, codes: U8, scales: U8, slot: I32, reach: I32, pool: I32, block_size: int
) -> F32:
    """Scores of each row's own blocks."""
    places = pool_places(pool.shape[1], block_size, codes.shape[1])
    y = np.full((len(q), places), -np.inf, np.float32)
    for row in np.flatnonzero(slot >= 0).tolist():
        entries = (pool[row][:, None] * block_size + np.arange(block_size)).reshape(-1)[:places]
        at = np.flatnonzero((entries >= 0) & (entries < reach[row]))
        keys = codes[slot[row], entries[at]], scales[slot[row], entries[at]]
        y[row, at] = _scores(q[row : row + 1], heads[row : row + 1], *keys)[0]
    return y


@dataclass(frozen=True)
class IndexScores(Op):
    """score_j = sum over heads of relu(q_h . key_j) * weight_h * scale for j < floor((p+1)/ratio),
    else -inf.

    Without a pool j is the place in y. With one, only entries of the row's own blocks are scored,
    in the pool's order: place i stands for entry pool[i // block_size] * block_size + i %
    block_size, and places of absent blocks hold -inf.

    Shapes:
        q: [T, Hi, I] bf16; weight: [T, Hi] bf16; codes: [slots, entries, I/2] u8; scales: [slots,
        entries, I/32] u8; slot, position: [T] i32; pool: [T, blocks] i32, ascending, then -1, or
        absent; y: [T, entries] f32, with a pool [T, places]. With several ranks y is the local
        heads' part.
    """

    q: Ref
    weight: Ref
    codes: Ref
    scales: Ref
    slot: Ref
    position: Ref
    pool: Ref | None
    y: Ref
    ratio: int
    block_size: int
    scale: float

    @staticmethod
    def reference(
        q: F32,
        weight: F32,
        codes: U8,
        scales: U8,
        slot: I32,
        position: I32,
        pool: I32 | None,
        ratio: int,
        block_size: int,
        scale: float,
    ) -> F32:
        """Dots of FP4 codes are exact in float64; the sum over heads rounds once to float32."""
        reach = (position + 1) // ratio
        heads = weight.astype(np.float64) * scale
        if pool is not None:
            return _inside(q, heads, codes, scales, slot, reach, pool, block_size)
        y = np.full((len(q), codes.shape[1]), -np.inf, np.float32)
        for s in np.unique(slot[slot >= 0]).tolist():
            rows = np.flatnonzero(slot == s)
            most = int(reach[rows].max())
            score = _scores(q[rows], heads[rows], codes[s, :most], scales[s, :most])
            score[np.arange(most) >= reach[rows, None]] = -np.inf
            y[rows, :most] = score
        return y

    @property
    def _heads(self) -> int:
        """Columns of a row in the product: a power of two, at least 2."""
        return max(2, 1 << (self.q.shape[1] - 1).bit_length())

    @property
    def _columns(self) -> int:
        """Heads of all rows that one pass over the keys serves; with a pool rows share no keys."""
        return max(8, self._heads) if self.pool else _COLUMNS

    @property
    def _shared(self) -> int:
        """Bytes: queries and weights of as many rows as columns have room for, 16 a run."""
        return self._columns * (2 * self.q.shape[2] + 4) + 16 * (self._columns // self._heads) + 16

    def variant(self) -> dict[str, int]:
        """Sizes of register tiles and shared memory."""
        return {
            "DIM": self.q.shape[2], "HEADS": self._heads, "COLUMNS": self._columns,
            "SHARED": self._shared,
        }  # fmt: skip

    def geometry(self) -> Geometry:
        """Rows in tiles that read the keys once; CTAs that take blocks of entries in turn."""
        rows, places = self.y.shape
        tiles = -(-rows // (self._columns // self._heads))
        blocks = min(-(-places // _BLOCK), max(8, _CTAS // tiles))
        return Geometry(blocks, tiles, 256, self._shared)

    def state_bytes(self) -> int:
        """All keys of every sequence that the step serves; with a pool every row's own."""
        entry = self.codes.shape[2] + self.scales.shape[2]
        return entry * (prod(self.y.shape) if self.pool else self.codes.shape[1])

    def flops(self) -> int:
        """Dots against all entries."""
        return 2 * prod(self.q.shape) * self.y.shape[1]
