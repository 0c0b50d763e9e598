"""Rows of an Engram table, dequantised and set side by side (model.md 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ultraflash.graphs.numerics import F32, U8, q8_decode
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I64


class Rows8(Protocol):
    """A table of FP8 rows that stays where it is stored: codes [R, dim] and E8M0 scales [R,
    dim/32].
    """

    @property
    def codes(self) -> U8:
        """E4M3 codes."""

    @property
    def scales(self) -> U8:
        """E8M0 bytes."""


@dataclass(frozen=True)
class EngramGather(Op):
    """The named rows as exact bf16 values, concatenated.

    Shapes:
        rows: [T, columns] i64; table: [R, dim] rows8; y: [T, columns*dim] bf16.
    """

    rows: Ref
    table: Ref
    y: Ref

    @staticmethod
    def reference(rows: I64, table: Rows8) -> F32:
        """Exact; reads only the named rows."""
        return q8_decode(table.codes[rows], table.scales[rows]).reshape(len(rows), -1)

    def geometry(self) -> Geometry:
        """A CTA a table row."""
        return Geometry(self.rows.shape[1], self.rows.shape[0], threads=128)

    def cost(self) -> Cost:
        """The named rows with their scales."""
        rows, columns = self.rows.shape
        dim = self.table.shape[1]
        return Cost(rows * columns * (dim + dim // 32) + self.y.nbytes, 0)
