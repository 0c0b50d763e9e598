"""A finished group's latent becomes a global key-value entry (model.md 4.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.numerics import F32, U8, qnv4
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.rows import I32


def finished_groups(slot: I32, position: I32, ratio: int) -> npt.NDArray[np.intp]:
    """Rows (of real sequences) whose token completes a group of `ratio` tokens."""
    return np.flatnonzero((slot >= 0) & ((position + 1) % ratio == 0))


@dataclass(frozen=True)
class StoreMainKv(Op):
    """Entry position // ratio of the row's slot = QNV4 of the rotated latent, where the row
    completes its group.

    The angle is that of the group's first token.

    Shapes:
        latent: [T, E] bf16; cos, sin: [T, rope/2] f32 of position - (ratio-1); slot, position: [T]
        i32; codes: [slots, entries, E/2] u8; scales: [slots, entries, E/16] u8.
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("codes", "scales")
    latent: Ref
    cos: Ref
    sin: Ref
    slot: Ref
    position: Ref
    codes: Ref
    scales: Ref
    ratio: int

    @staticmethod
    def reference(
        latent: F32, cos: F32, sin: F32, slot: I32, position: I32, codes: U8, scales: U8, ratio: int
    ) -> None:
        """Bit-exact given the rotated bf16 values."""
        rows = finished_groups(slot, position, ratio)
        if len(rows):
            at = slot[rows], position[rows] // ratio
            codes[at], scales[at] = qnv4(rotate(latent[rows], cos[rows], sin[rows]))

    def state_bytes(self) -> int:
        """One entry a row at most."""
        return self.latent.shape[0] * (self.codes.shape[2] + self.scales.shape[2])
