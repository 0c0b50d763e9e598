"""The plan of a decode step (architecture.md section 3)."""

from __future__ import annotations

from ultraflash.graphs.backbone import all_layers, head
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.step import last_rows, sample, scope


def build_decode(
    model: Model,
    rows: int,
    sequences: int,
    capacity: Capacity,
    *,
    world: int = 1,
    round_attention: bool = False,
) -> Plan:
    """`rows` rows ragged over `sequences` sequences: logits of every row, a token for each
    sequence's last row.

    Raises:
        WorldError: when the model cannot be split over `world` ranks.
    """
    s = scope("decode", model, rows, sequences, capacity, world, round_attention)
    logits = head(s, all_layers(s))
    sample(s, last_rows(s, "logits", logits))
    return s.b.build()
