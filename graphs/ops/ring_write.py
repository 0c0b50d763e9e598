"""Rows enter a position-addressed ring (architecture.md section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class RingWrite(Op):
    """ring[slot, position mod R] = row, for the last R active rows of each sequence.

    Stands after the step's reads: a chunk longer than the ring would overwrite what its early rows
    still need.

    Shapes:
        value: [T, ...]; ring: [slots, R, ...], R a power of two; slot, position: [T] i32;
        row_start: [S+1] i32; second, second_ring: as value and ring, or absent.
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("ring", "second_ring")
    value: Ref
    ring: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    second: Ref | None = None
    second_ring: Ref | None = None

    @staticmethod
    def reference(
        value: npt.NDArray[Any], ring: npt.NDArray[Any], slot: I32, position: I32, row_start: I32,
        second: npt.NDArray[Any] | None = None, second_ring: npt.NDArray[Any] | None = None,
    ) -> None:  # fmt: skip
        """A copy; exact."""
        size = ring.shape[1]
        for first, end in zip(row_start[:-1].tolist(), row_start[1:].tolist(), strict=True):
            rows = np.arange(max(first, end - size), end)
            ring[slot[rows], position[rows] & (size - 1)] = value[rows]
            if second_ring is not None and second is not None:
                second_ring[slot[rows], position[rows] & (size - 1)] = second[rows]

    def state_bytes(self) -> int:
        """The rows written."""
        return self.value.nbytes + (self.second.nbytes if self.second else 0)
