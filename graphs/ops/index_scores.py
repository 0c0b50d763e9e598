"""How well each global entry answers a row's index query (model.md 4.6)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from ultraflash.graphs.numerics import F32, U8, qmx4_decode
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32

_COLUMNS = 256  # heads of all rows that one pass over the keys serves
_BLOCK = 256  # entries that a CTA scores at once
_CTAS = 528  # four for each of 132 SMs


@dataclass(frozen=True)
class IndexScores(Op):
    """score_j = sum over heads of relu(q_h . key_j) * weight_h * scale for j < floor((p+1)/ratio),
    else -inf.

    Shapes:
        q: [T, Hi, I] bf16; weight: [T, Hi] bf16; codes: [slots, entries, I/2] u8; scales: [slots,
        entries, I/32] u8; slot, position: [T] i32; y: [T, entries] f32. With several ranks y is the
        local heads' part.
    """

    q: Ref
    weight: Ref
    codes: Ref
    scales: Ref
    slot: Ref
    position: Ref
    y: Ref
    ratio: int
    scale: float

    @staticmethod
    def reference(
        q: F32,
        weight: F32,
        codes: U8,
        scales: U8,
        slot: I32,
        position: I32,
        ratio: int,
        scale: float,
    ) -> F32:
        """Dots of FP4 codes are exact in float64; the sum over heads rounds once to float32."""
        y = np.full((len(q), codes.shape[1]), -np.inf, np.float32)
        reach = (position + 1) // ratio
        heads = weight.astype(np.float64) * scale
        for s in np.unique(slot[slot >= 0]).tolist():
            rows = np.flatnonzero(slot == s)
            most = int(reach[rows].max())
            keys = qmx4_decode(codes[s, :most], scales[s, :most]).astype(np.float64)
            dots = np.maximum(q[rows].astype(np.float64) @ keys.T, 0)
            score = np.einsum("tj,tjn->tn", heads[rows], dots).astype(np.float32)
            score[np.arange(most) >= reach[rows, None]] = -np.inf
            y[rows, :most] = score
        return y

    @property
    def _heads(self) -> int:
        """Columns of a row in the product: a power of two, at least 2."""
        return max(2, 1 << (self.q.shape[1] - 1).bit_length())

    @property
    def _shared(self) -> int:
        """Bytes: queries and weights of as many rows as columns have room for, 16 a run."""
        return _COLUMNS * (2 * self.q.shape[2] + 4) + 16 * (_COLUMNS // self._heads) + 16

    def compiled(self) -> tuple[tuple[str, int], ...]:
        """Sizes of register tiles and shared memory."""
        return (
            ("DIM", self.q.shape[2]), ("HEADS", self._heads), ("COLUMNS", _COLUMNS),
            ("SHARED", self._shared),
        )  # fmt: skip

    def geometry(self) -> Geometry:
        """Rows in tiles that read the keys once; CTAs that take blocks of entries in turn."""
        rows, entries = self.y.shape
        tiles = -(-rows // (_COLUMNS // self._heads))
        blocks = min(-(-entries // _BLOCK), max(8, _CTAS // tiles))
        return Geometry(blocks, tiles, 256, self._shared)

    def state_bytes(self) -> int:
        """All keys of every sequence that the step serves."""
        return self.codes.shape[1] * (self.codes.shape[2] + self.scales.shape[2])

    def flops(self) -> int:
        """Dots against all entries."""
        return 2 * prod(self.q.shape) * self.codes.shape[1]
