"""Rows that earlier steps left in a ring become this step's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class RingRead(Op):
    """y = ring[slot, position mod R] for every row; idle rows give arbitrary finite values.

    Shapes:
        ring: [slots, R, ...], R a power of two; slot, position: [T] i32; y: [T, ...].
    """

    ring: Ref
    slot: Ref
    position: Ref
    y: Ref

    @staticmethod
    def reference(ring: npt.NDArray[Any], slot: I32, position: I32) -> npt.NDArray[Any]:
        """A copy; exact."""
        rows: npt.NDArray[Any] = ring[slot, position & (ring.shape[1] - 1)]
        return rows

    def geometry(self) -> Geometry:
        """A CTA a row."""
        return Geometry(self.position.shape[0])

    def state_bytes(self) -> int:
        """The rows read."""
        return self.y.nbytes
