"""How much a server holds: slots, context and ring lengths; every state buffer follows."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.model import Model

MAX_ROWS = 16  # widest step that plans are built for


@dataclass(frozen=True)
class Capacity:
    """Sizes of persistent state. `slots` conversations at most live on the device, each up to
    `max_seq` tokens.
    """

    slots: int
    max_seq: int

    def ring(self, model: Model) -> int:
        """Rows of a ring: the power of two that holds a window and two steps of rejected rows."""
        return 1 << (model.window + 2 * MAX_ROWS - 1).bit_length()

    def entries(self, ratio: int) -> int:
        """Global entries of a slot in a layer of this compression ratio."""
        return -(-self.max_seq // ratio)
