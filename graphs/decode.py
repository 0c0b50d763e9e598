"""The plan of a decode step (architecture.md section 3)."""

from __future__ import annotations

from ultraflash.graphs.backbone import all_layers, head
from ultraflash.graphs.draft import append_context, draft, drafted_from
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.step import Build, accept, follow_rows, next_rows, scope


def build_decode(build: Build, rows: int, sequences: int) -> Plan:
    """Rows -> embed -> layers -> head -> accept -> next block -> confidences -> next rows.

    `rows` rows are ragged over `sequences` sequences: each has the token sampled last, then drafts.

    Raises:
        WorldError: when the model cannot be split over `build.world` ranks.
    """
    s = scope("decode", build, rows, sequences, rows)
    follow_rows(s, build.block)
    out = all_layers(s, taps=build.block > 0)
    logits = head(s, out.streams)
    accept(s, logits, drafted_from(s, build.block) if build.block and rows > sequences else None)
    if out.taps:
        append_context(s, out.taps)
        draft(s, build.block)
    next_rows(s, build.block)
    return s.b.build()
