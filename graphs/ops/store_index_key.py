"""A finished group's latent becomes an index key (model.md 4.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ultraflash.graphs.numerics import F32, U8, qmx4
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.ops.store_main_kv import finished_groups
from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class StoreIndexKey(Op):
    """Entry position // ratio of the row's slot = QMX4 of the rotated key, where the row completes
    its group.

    Shapes:
        key: [T, I] bf16, normed; cos, sin: [T, rope/2] f32 of position - (ratio-1); slot, position:
        [T] i32; codes: [slots, entries, I/2] u8; scales: [slots, entries, I/32] u8.
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("codes", "scales")
    key: Ref
    cos: Ref
    sin: Ref
    slot: Ref
    position: Ref
    codes: Ref
    scales: Ref
    ratio: int

    @staticmethod
    def reference(
        key: F32, cos: F32, sin: F32, slot: I32, position: I32, codes: U8, scales: U8, ratio: int
    ) -> None:
        """Bit-exact given the rotated bf16 values."""
        rows = finished_groups(slot, position, ratio)
        if len(rows):
            at = slot[rows], position[rows] // ratio
            codes[at], scales[at] = qmx4(rotate(key[rows], cos[rows], sin[rows]))

    def state_bytes(self) -> int:
        """One entry a row at most."""
        return self.key.shape[0] * (self.codes.shape[2] + self.scales.shape[2])
