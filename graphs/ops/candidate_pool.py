"""Blocks of entries that later index layers may choose from (model.md 4.6, candidate source)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.ops.select_topk import topk_geometry
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class CandidatePool(Op):
    """The best blocks by their best reachable score, the newest block always among them; equal
    scores: the earlier.

    Shapes:
        scores: [T, entries] f32; position: [T] i32; y: [T, blocks] i32 block numbers, ascending,
        then -1.
    """

    scores: Ref
    position: Ref
    y: Ref
    ratio: int
    block_size: int
    blocks: int

    @staticmethod
    def reference(scores: F32, position: I32, ratio: int, block_size: int, blocks: int) -> I32:
        """Exact; ties by block number."""
        pool = np.full((len(scores), blocks), -1, np.int32)
        for row, reach in enumerate(((position + 1) // ratio).tolist()):
            count = -(-reach // block_size)
            if count <= blocks:
                pool[row, :count] = np.arange(count)
                continue
            padded = np.full(count * block_size, -np.inf, np.float32)
            padded[:reach] = scores[row, :reach]
            best = padded.reshape(count, block_size).max(axis=1)
            best[-1] = np.inf
            pool[row] = np.sort(np.argsort(-best, kind="stable")[:blocks])
        return pool

    def geometry(self) -> Geometry:
        """A cluster of CTAs a row, which keep the best score of each block."""
        rows, entries = self.scores.shape
        return topk_geometry(rows, -(-entries // self.block_size), kept=4)
