"""The plan of one chunk of a prompt (architecture.md section 3)."""

from __future__ import annotations

from dataclasses import replace

from ultraflash.graphs.backbone import all_layers, head
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.layers import Streams
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.step import last_rows, sample, scope


def build_prefill(
    model: Model, rows: int, capacity: Capacity, *, world: int = 1, round_attention: bool = False
) -> Plan:
    """Up to `rows` rows of one sequence: logits and a token for the last one only.

    A prefill ends like a decode step, so that the first decode step is an ordinary one.

    Raises:
        WorldError: when the model cannot be split over `world` ranks.
    """
    s = scope("prefill", model, rows, 1, capacity, world, round_attention)
    streams = all_layers(s)
    last = Streams(last_rows(s, "x", streams.x), last_rows(s, "pre", streams.pre))
    sample(s, head(replace(s, rows=1), last))
    return s.b.build()
