"""What decode and prefill plans share: the scope, the last rows, verification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.io import io_buffers
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.ops.follow_rows import FollowRows
from ultraflash.graphs.ops.last_io import LastIo
from ultraflash.graphs.ops.next_rows import NextRows
from ultraflash.graphs.ops.take_last import TakeLast
from ultraflash.graphs.plan import PlanBuilder, Ref
from ultraflash.graphs.scope import Scope
from ultraflash.graphs.width import LOW, PER_LOGIT


@dataclass(frozen=True)
class Build:
    """What all plans of a server have in common.

    `block` rows are drafted behind every sequence, 0 = no drafting. `round_attention` is the test
    switch that rounds attention weights to bf16 as the model authors' kernel does.
    """

    model: Model
    capacity: Capacity
    world: int = 1
    block: int = 0
    round_attention: bool = False


def scope(name: str, build: Build, rows: int, sequences: int, sampled_rows: int) -> Scope:
    """An empty plan with its io buffers.

    Raises:
        WorldError: when the model cannot be split over `build.world` ranks.
    """
    build.model.check_world(build.world)
    b = PlanBuilder(name, rows, sequences, build.world)
    io = io_buffers(b, build.model, build.block, sampled_rows)
    return Scope(b, build.model, build.capacity, io, build.round_attention, rows)


def follow_rows(s: Scope, block: int) -> None:
    """Sequences that go on take their rows from their last step, before anybody reads io."""
    io, kept = s.io, _next(s, block)
    op = FollowRows(
        follows=io.follows,
        end=io.end,
        ban=io.ban,
        ban_end=io.ban_end,
        own=io.own if block else None,
        threshold=io.threshold if block else None,
        chance=io.chance if block else None,
        price=io.price if block else None,
        next_ids=kept.ids,
        next_at=kept.at,
        next_confidence=kept.confidence,
        row_start=io.row_start,
        slot=io.slot,
        ids=io.ids,
        position=io.position,
        banned=io.banned,
        step=io.step,
        kept=io.kept,
        low=LOW,
        per_logit=PER_LOGIT,
    )
    s.b.add("step.follow", op)


def next_rows(s: Scope, block: int) -> None:
    """What each slot's next step begins with, behind acceptance and drafts."""
    io, kept = s.io, _next(s, block)
    op = NextRows(
        token=io.token,
        accepted=io.accepted,
        drafts=io.drafts if block else None,
        confidence=io.confidence if block else None,
        slot=io.slot,
        position=io.position,
        row_start=io.row_start,
        step=io.step,
        next_ids=kept.ids,
        next_at=kept.at,
        next_confidence=kept.confidence,
    )
    s.b.add("next", op)


class _Next(NamedTuple):
    """What a step leaves for the next one of its slot."""

    ids: Ref
    at: Ref
    confidence: Ref | None


def _next(s: Scope, block: int) -> _Next:
    slots = s.capacity.slots
    return _Next(
        s.b.state("next.ids", (slots, 1 + block), "i32"),
        s.b.state("next.at", (slots, 2), "i32"),
        s.b.state("next.confidence", (slots, block), "f32") if block else None,
    )


def last_rows(s: Scope, name: str, x: Ref) -> Ref:
    """The last row of each sequence, [S, ...]."""
    y = s.b.scratch(f"last.{name}", (s.b.sequences, *x.shape[1:]), x.dtype)
    s.b.add(f"last.{name}", TakeLast(x, s.io.row_start, y))
    return y


def last_scope(s: Scope) -> Scope:
    """The same plan behind its last layer, where only each sequence's last row goes on."""
    io, count = s.io, s.b.sequences

    def last(name: str, size: int = count) -> Ref:
        return s.b.scratch(f"last.{name}", (size,), "i32")

    ids, slot, position, start = (
        last("ids"),
        last("slot"),
        last("position"),
        last("row_start", count + 1),
    )
    s.b.add(
        "last.io", LastIo(io.ids, io.slot, io.position, io.row_start, ids, slot, position, start)
    )
    mask, banned = last_rows(s, "mask", io.mask), last_rows(s, "banned", io.banned)
    tail = replace(
        io, ids=ids, slot=slot, position=position, row_start=start, mask=mask, banned=banned
    )
    return replace(s, io=tail, rows=count)


def accept(s: Scope, logits: Ref, q: Ref | None) -> None:
    """Verify the drafts among the rows of `s` and draw the token behind them. logits: [rows, V]."""
    io = s.io
    op = Accept(
        logits=logits,
        ids=io.ids,
        slot=io.slot,
        position=io.position,
        row_start=io.row_start,
        q=q,
        mask=io.mask,
        bias_ids=io.bias_ids,
        bias=io.bias,
        banned=io.banned,
        temperature=io.temperature,
        top_p=io.top_p,
        top_k=io.top_k,
        seed=io.seed,
        step=io.step,
        want_logprobs=io.want_logprobs,
        accepted=io.accepted,
        token=io.token,
        logprob=io.logprob,
        top_ids=io.top_ids,
        top_logprobs=io.top_logprobs,
    )
    s.b.add("accept", op)
