"""DSpark drafting as nodes (model.md section 6): context rows from taps, a block of draft rows, the
Markov chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ultraflash.graphs.attention import output_projection, project, window_rows
from ultraflash.graphs.backbone import gather, head_logits
from ultraflash.graphs.ops.confidence import Confidence
from ultraflash.graphs.ops.draft_attention import DraftAttention
from ultraflash.graphs.ops.draft_rows import DraftRows
from ultraflash.graphs.ops.draft_sample import DraftSample
from ultraflash.graphs.ops.embed import Embed
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.markov_embed import MarkovEmbed
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.residual import residual_layer
from ultraflash.graphs.scope import Angles, Scope, Streams, angles, ring, write_rings


def drafted_from(s: Scope, block: int) -> Ref:
    """What every slot's drafts were drawn from, kept until they are verified. [slots, B, V]."""
    return s.b.state("draft.q", (s.capacity.slots, block, s.model.vocab), "f32")


def append_context(s: Scope, taps: Ref) -> None:
    """Context rows of every stage, from the taps of this step's rows (model.md 6.1).

    Rows of drafts that were rejected are written too; they stand behind the last accepted position,
    where nobody reads before the next step overwrites them.
    """
    m = s.model
    proj = s.linear(
        "context.main_proj",
        s.quant8("context.taps_q8", taps),
        "mtp.0.main_proj",
        m.hidden,
        "fp8",
    )
    main_q8 = s.quant8("context.main_x_q8", s.norm("context.main_x", proj, "mtp.0.main_norm"))
    at = _plain_angles(s)
    for stage in range(m.draft_stages):
        label, weights = f"context.{stage}", f"mtp.{stage}.attn"
        row = s.linear(f"{label}.wkv", main_q8, f"{weights}.wkv", m.head_dim, "fp8")
        rows = window_rows(s, label, weights, row, at)
        write_rings(s, f"context.{stage}.write", rows, _rings(s, stage))


def draft(s: Scope, block: int) -> None:
    """Propose `block` tokens behind every sequence's last accepted row, with confidences (model.md
    6.2).
    """
    m = s.model
    d = _block_scope(s, block)
    x, pre = d.out("draft.x", (m.hc, m.hidden)), d.out("draft.pre", (m.hc,), "f32")
    table = s.b.weight("embed", (m.vocab, m.hidden), "bf16")
    s.b.add("draft.embed", Embed(d.io.ids, table, x, pre, m.hc))
    at, streams = angles(d, "draft.angles", "plain"), Streams(x, pre)
    for stage in range(m.draft_stages):
        streams = _stage(d, stage, streams, at, block)
    h = d.out("draft.h", (m.hidden,))
    s.b.add("draft.collapse", HcCollapse(streams.x, streams.pre, h))
    last = f"mtp.{m.draft_stages - 1}"
    logits = head_logits(d, "draft", d.norm("draft.in", h, f"{last}.norm"))
    for index in range(block):
        _propose(d, index, block, h, logits, last)


def _block_scope(s: Scope, block: int) -> Scope:
    """A scope of block * sequences rows, placed behind the accepted rows of `s`."""
    io, count = s.io, s.b.sequences * block
    rows = {
        name: s.b.scratch(f"draft.{name}", (count,), "i32")
        for name in ("ids", "at", "slot", "text")
    }
    op = DraftRows(
        token=io.token,
        accepted=io.accepted,
        slot=io.slot,
        position=io.position,
        row_start=io.row_start,
        ids=rows["ids"],
        at=rows["at"],
        at_slot=rows["slot"],
        text=rows["text"],
        block=block,
        noise=s.model.draft_noise,
    )
    s.b.add("draft.rows", op)
    placed = replace(
        io, ids=rows["ids"], position=rows["at"], slot=rows["slot"], is_image=rows["text"]
    )
    return replace(s, io=placed, rows=count)


def _stage(d: Scope, stage: int, streams: Streams, at: Angles, block: int) -> Streams:
    """One draft stage: a window-only layer whose block rows see each other."""
    m, label, weights = d.model, f"draft.stage{stage}", f"mtp.{stage}"

    def attention(x: Ref, x_q8: Ref, meanwhile: Callable[[], None]) -> Ref:
        attn = f"{label}.attn"
        made = project(d, attn, f"{weights}.attn", x_q8, at)
        o = d.out(f"{attn}.o", (d.split(m.heads) * m.head_dim,))
        ring_codes, ring_scales = _rings(d, stage)
        op = DraftAttention(
            q=made.q,
            codes=made.kv[0],
            scales=made.kv[1],
            ring_codes=ring_codes,
            ring_scales=ring_scales,
            sink=d.b.weight(f"{weights}.attn.attn_sink", (d.split(m.heads),), "f32"),
            cos=at.cos,
            sin=at.sin,
            slot=d.io.slot,
            position=d.io.position,
            y=o,
            window=m.window,
            block=block,
            round_weights=d.round_attention,
        )
        d.b.add(f"{attn}.attend", op)
        meanwhile()
        return output_projection(d, attn, f"{weights}.attn", o)

    experts = (m.draft_experts, m.draft_active_experts)
    return residual_layer(d, label, weights, streams, attention, experts)


def _propose(d: Scope, index: int, block: int, h: Ref, logits: Ref, last: str) -> None:
    """Draft `index`: Markov correction by the token before it, a draw, its confidence."""
    m, io, label, count = d.model, d.io, f"draft.{index}", d.b.sequences
    one = replace(d, rows=count)
    me = one.out(f"{label}.me", (m.draft_markov_rank,))
    table = d.b.weight(f"{last}.markov_head.embed", (m.vocab, m.draft_markov_rank), "bf16")
    d.b.add(f"{label}.embed", MarkovEmbed(io.token, io.drafts, table, me, index))
    markov = one.linear(
        f"{label}.markov", me, f"{last}.markov_head.head", d.split(m.vocab), "bf16", "f32"
    )
    op = DraftSample(
        logits=logits,
        markov=gather(one, label, markov),
        at=io.position,
        slot=io.slot,
        bias_ids=io.bias_ids,
        bias=io.bias,
        temperature=io.temperature,
        top_p=io.top_p,
        top_k=io.top_k,
        seed=io.seed,
        step=io.step,
        drafts=io.drafts,
        q=drafted_from(d, block),
        index=index,
        block=block,
    )
    d.b.add(f"{label}.sample", op)
    w = d.b.weight(f"{last}.confidence_head.proj", (1, m.hidden + m.draft_markov_rank), "bf16")
    d.b.add(f"{label}.confidence", Confidence(h, me, w, io.confidence, index), beside=True)


def _rings(s: Scope, stage: int) -> tuple[Ref, Ref]:
    dim = s.model.head_dim
    return ring(s, f"draft.stage{stage}.ring_codes", (dim,), "u8"), ring(
        s, f"draft.stage{stage}.ring_scales", (dim // 32,), "u8"
    )


def _plain_angles(s: Scope) -> Angles:
    """The angles that the step's prologue made for its own rows."""
    half = (s.model.rope_dim // 2,)
    return Angles(s.out("step.plain.cos", half, "f32"), s.out("step.plain.sin", half, "f32"))
