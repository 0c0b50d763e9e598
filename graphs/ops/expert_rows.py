"""Which rows each expert serves, where there are many: prefill (model.md 4.7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


def num_chunks(pairs: int, experts: int, rows: int) -> int:
    """Chunks of up to `rows` pairs of one expert each, at most, however they fall."""
    return min(experts, pairs) + pairs // rows


@dataclass(frozen=True)
class ExpertRows(Op):
    """Pairs of a row and one of its experts in order of experts, cut into chunks.

    A pair is its place in `ids`; pairs of one expert keep their order. Unused chunks are zero.

    Shapes:
        ids: [T, k] i32; order: [T*k] i32; chunks: [C, 3] i32: expert, first place in `order`,
        count up to `rows`; C as `num_chunks` says.
    """

    OUT: ClassVar[tuple[str, ...]] = ("order", "chunks")
    ids: Ref
    order: Ref
    chunks: Ref
    experts: int
    rows: int

    @staticmethod
    def reference(ids: I32, experts: int, rows: int) -> tuple[I32, I32]:
        """A stable sort."""
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        chunks = np.zeros((num_chunks(len(flat), experts, rows), 3), np.int32)
        counts = np.bincount(flat, minlength=experts)
        starts = np.cumsum(counts) - counts
        cut = [
            (expert, starts[expert] + first, min(rows, counts[expert] - first))
            for expert in range(experts)
            for first in range(0, counts[expert], rows)
        ]
        chunks[: len(cut)] = cut
        return order, chunks

    def geometry(self) -> Geometry:
        """A CTA an expert, with a counter for each."""
        return Geometry(self.experts, threads=512, shared=4 * self.experts)
