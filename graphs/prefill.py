"""The plan of one chunk of a prompt (architecture.md section 3)."""

from __future__ import annotations

from ultraflash.graphs.backbone import all_layers, head
from ultraflash.graphs.draft import append_context, draft
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.scope import Scope, Streams
from ultraflash.graphs.step import Build, accept, last_rows, last_scope, next_rows, scope


def build_prefill(build: Build, rows: int, *, ends: bool = True) -> Plan:
    """Up to `rows` rows of one sequence; logits, a token and drafts behind the last one only.

    A prefill ends like a decode step, so that the first decode step is an ordinary one. With `ends`
    false the chunk is not the last one and nothing comes behind its layers.

    Raises:
        WorldError: when the model cannot be split over `build.world` ranks.
    """
    s = scope("prefill" if ends else "prefill_part", build, rows, 1, 1)
    out = all_layers(s, taps=build.block > 0)
    if out.taps:
        append_context(s, out.taps)
    if ends:
        end_of_prompt(s, build.block, out.streams)
    return s.b.build()


def end_of_prompt(s: Scope, block: int, streams: Streams) -> None:
    """Head, token and drafts behind the last row of each sequence, and its next rows."""
    x, pre = last_rows(s, "x", streams.x), last_rows(s, "pre", streams.pre)
    tail = last_scope(s)
    accept(tail, head(tail, Streams(x, pre)), None)
    if block:
        draft(tail, block)
    next_rows(tail, block)
