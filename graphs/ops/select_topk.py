"""Which global entries a row attends to (model.md 4.6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32

_CTAS = 8  # of a row's cluster
_SHORT = 1 << 17
_DRAW_THREADS = 512


def topk_geometry(rows: int, count: int, kept: int = 0) -> Geometry:
    """A cluster of CTAs a row of `count` scores, of which each CTA keeps its own part in shared
    memory, `kept` bytes each.

    Many rows have threads enough; few rows need them for one row's loads.
    """
    threads = 256 if rows > 16 else 512 if count <= _SHORT else 1024
    return Geometry(rows * _CTAS, threads=threads, shared=kept * _length(count, threads))


def held_geometry(rows: int, count: int) -> Geometry:
    """A cluster of CTAs a row of `count` logits, of which each CTA holds its slice in shared
    memory."""
    return Geometry(rows * _CTAS, threads=_DRAW_THREADS, shared=4 * _length(count, _DRAW_THREADS))


def _length(count: int, threads: int) -> int:
    """Elements of a row that a CTA has: the last warps have less of them, or none."""
    warps = threads // 32
    return -(-count // (128 * _CTAS * warps)) * 128 * warps


@dataclass(frozen=True)
class SelectTopk(Op):
    """The k best reachable entries, ascending; equal scores: the smaller entry. With a pool, only
    entries inside it; scores then stand in the pool's order, as `IndexScores` gives them.

    Shapes:
        scores: [T, entries] f32, with a pool [T, places]; position: [T] i32; pool: [T, blocks] i32,
        ascending, then -1, or absent; y: [T, k] i32, then -1.
    """

    scores: Ref
    position: Ref
    pool: Ref | None
    y: Ref
    ratio: int
    block_size: int
    k: int

    @staticmethod
    def reference(
        scores: F32, position: I32, pool: I32 | None, ratio: int, block_size: int, k: int
    ) -> I32:
        """Exact; a stable sort keeps the smaller entry first among equals."""
        chosen = np.full((len(scores), k), -1, np.int32)
        for row, reach in enumerate(((position + 1) // ratio).tolist()):
            if pool is None:
                entries = np.arange(reach)
            else:
                kept = pool[row][pool[row] >= 0]
                entries = (kept[:, None] * block_size + np.arange(block_size)).reshape(-1)
                entries = entries[entries < reach]  # only the newest block may reach too far
            if len(entries) > k:
                order = np.argsort(-scores[row, : len(entries)], kind="stable")[:k]
                entries = np.sort(entries[order])
            chosen[row, : len(entries)] = entries
        return chosen

    def geometry(self) -> Geometry:
        """A cluster of CTAs a row."""
        return topk_geometry(*self.scores.shape)
