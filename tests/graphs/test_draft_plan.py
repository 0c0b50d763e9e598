"""What drafting adds to the plans of the release (model.md 6, 2.4; architecture.md 3): which node
does what, over which buffers, in which order.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest

from helpers.golden_plans import tiny_model
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.ops.all_gather import AllGather
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.ops.attention import Attention
from ultraflash.graphs.ops.confidence import Confidence
from ultraflash.graphs.ops.draft_attention import DraftAttention
from ultraflash.graphs.ops.draft_rows import DraftRows
from ultraflash.graphs.ops.draft_sample import DraftSample
from ultraflash.graphs.ops.embed import Embed
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.ops.markov_embed import MarkovEmbed
from ultraflash.graphs.ops.ring_write import RingWrite
from ultraflash.graphs.ops.rope_table import RopeTable
from ultraflash.graphs.ops.window_kv import WindowKv
from ultraflash.graphs.plan import Life, Op, Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.weights.table import weight_table

every_block = pytest.mark.parametrize("block", [5, 6, 7])
CAPACITY = Capacity(slots=3, max_seq=256)


@functools.cache
def release(block: int = 5, rows: int = 6, world: int = 1) -> Plan:
    return build_decode(Build(release_model(), CAPACITY, world=world, block=block), rows, 1)


def found(plan: Plan, kind: type[Op], prefix: str = "draft") -> list[Op]:
    return [n.op for n in plan.nodes if isinstance(n.op, kind) and n.label.startswith(f"{prefix}.")]


@every_block
def test_a_decode_step_verifies_then_appends_then_drafts(block: int) -> None:
    plan = release(block)
    spans = [plan.span(name) for name in ("head", "accept", "context", "draft")]
    assert all(a.stop == b.start for a, b in pairwise(spans))
    assert [n.label for n in plan.nodes[spans[-1].stop :]] == ["next"]


@every_block
def test_the_stages_of_the_release(block: int) -> None:
    """Three layers of ratio 0 with their own weights: 128 experts of which 3, no Engram."""
    plan = release(block)
    attends = [op for op in found(plan, DraftAttention) if isinstance(op, DraftAttention)]
    gates = [op for op in found(plan, Gate) if isinstance(op, Gate)]
    assert len(attends) == len(gates) == 3
    assert not found(plan, Attention)
    for stage, (attend, gate) in enumerate(zip(attends, gates, strict=True)):
        assert (attend.window, attend.block) == (128, block)
        assert attend.ring_codes.name == f"draft.stage{stage}.ring_codes"
        assert attend.sink.name == f"mtp.{stage}.attn.attn_sink"
        assert attend.q.shape == (block, 64, 512)
        assert (gate.logits.shape, gate.k) == ((block, 128), 3)
        assert gate.is_image.name == "draft.text"  # the text bias, whatever the target's rows were
    tables = {op.cos.name: op for op in found(plan, RopeTable) if isinstance(op, RopeTable)}
    table = tables[attends[0].cos.name]
    assert (table.freq.name, table.position.name, table.offset) == ("rope.plain", "draft.at", 0)


@every_block
def test_the_heads_of_the_release(block: int) -> None:
    """Embedding and head are the target's; a token, a draw and a confidence for each place."""
    plan = release(block)
    (embed,), (rows,) = found(plan, Embed), found(plan, DraftRows)
    assert isinstance(embed, Embed)
    assert isinstance(rows, DraftRows)
    assert (embed.table.name, embed.copies) == ("embed", 4)
    assert (rows.block, rows.noise) == (block, 128799)
    assert (rows.token.name, rows.accepted.name) == ("io.token", "io.accepted")
    assert plan.buffers["draft.logits"].shape == (block, 129280)
    for kind in (MarkovEmbed, DraftSample, Confidence):
        ops = found(plan, kind)
        assert [op.index for op in ops] == list(range(block))  # type: ignore[attr-defined]
    confidences = [op for op in found(plan, Confidence) if isinstance(op, Confidence)]
    assert {op.h.name for op in confidences} == {"draft.h"}  # not the normed `draft.in`
    order = [type(n.op) for n in plan.nodes if isinstance(n.op, MarkovEmbed | DraftSample)]
    assert order == [MarkovEmbed, DraftSample] * block


def test_taps_of_the_release() -> None:
    """Means of the inputs of layers 37, 38, 39, in this order, side by side."""
    plan = release()
    labels = [n.label for n in plan.nodes if n.label.endswith(".tap")]
    assert labels == ["L37.tap", "L38.tap", "L39.tap"]
    assert plan.buffers["L39.tap"].shape == (6, 15360)
    taps = [n.op for n in plan.nodes if n.label.endswith(".tap")]
    for number, op in zip((37, 38, 39), taps, strict=True):
        assert op.x.name == f"L{number - 1}.X"  # type: ignore[attr-defined]


@every_block
def test_context_rows_are_written_once_before_any_block_reads_them(block: int) -> None:
    plan = release(block)
    writers = [(i, n.op) for i, n in enumerate(plan.nodes) if isinstance(n.op, RingWrite)]
    writes = {ring.name: i for i, op in writers for ring in op.writes()}
    assert len(writes) == sum(len(op.writes()) for _, op in writers)
    rings = {r.name for r in plan.of_life(Life.STATE) if r.name.startswith("draft.stage")}
    assert len(rings) == 6
    assert rings <= writes.keys()
    first = plan.span("draft").start
    assert all(writes[name] < first for name in rings)  # and block rows are never stored


def test_context_rows_of_the_release() -> None:
    """From the normed projection of the taps alone, turned by the plain table at the rows' own
    positions; no block row takes part (model.md 6.1)."""
    plan = release()
    nodes = {n.label: n.op for n in plan.nodes}
    (made,) = [op for op in found(plan, RopeTable, "step") if op.cos.name == "step.plain.cos"]  # type: ignore[attr-defined]
    assert made.position.name == "io.position"  # type: ignore[attr-defined]
    assert nodes["context.main_proj"].x.name == "context.taps_q8"  # type: ignore[attr-defined]
    for stage in range(3):
        rows = nodes[f"context.{stage}.window_kv"]
        assert isinstance(rows, WindowKv)
        assert (rows.cos.name, rows.sin.name) == ("step.plain.cos", "step.plain.sin")
        projection = nodes[f"context.{stage}.wkv"]
        assert isinstance(projection, Linear)
        assert projection.x.name == "context.main_x_q8"
        assert projection.w.name == f"mtp.{stage}.attn.wkv"


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_all_weights_are_used_and_split_as_the_table_says(world: int) -> None:
    table, plan = weight_table(release_model()), release(world=world)
    used = {ref.name: ref for ref in plan.of_life(Life.WEIGHT)}
    # Bias of image rows: a draft's rows are text, but its gate names the tensor.
    assert used.keys() == table.keys()
    for name, ref in used.items():
        whole = list(table[name].shape)
        if (axis := table[name].axis) is not None:
            whole[axis] //= world
        assert ref.shape == tuple(whole), name


@pytest.mark.parametrize("world", [2, 4, 8])
def test_what_ranks_exchange_to_draft(world: int) -> None:
    """Two sums a stage, the block's logits, a correction for each place: fp32 parts."""
    plan = release(world=world)
    assert len(found(plan, AllReduce)) == 2 * 3
    assert len(found(plan, AllGather)) == 1 + 5
    assert not found(plan, AllReduce, "context")


def test_every_prefill_appends_and_only_the_last_one_drafts() -> None:
    build = Build(release_model(), CAPACITY, block=5)
    whole, part = build_prefill(build, 64), build_prefill(build, 64, ends=False)
    for plan in (whole, part):
        assert [n.label for n in plan.nodes[plan.span("context")]] == [
            n.label for n in release().nodes[release().span("context")]
        ]
    assert [n.label for n in whole.nodes[whole.span("draft")]] == [
        n.label for n in release().nodes[release().span("draft")]
    ]
    assert not found(part, Op)


def test_bytes_of_a_draft() -> None:
    """Weights read for one block at least: attention, mixes, heads, shared experts, and at most
    5 x 3 routed experts a stage (model.md 2.4)."""
    span = release().span("draft")
    moved = sum(n.op.cost().nbytes for n in release().nodes[span])
    routed, shared = 3 * 5 * 3 * 18_800_640, 106_272_000
    heads = 5 * 2 * 129280 * 256 + 2 * 129280 * 5120
    attention = 474_774_152 - 15360 * 5120  # all the rest, without main_proj
    least = routed + shared + heads + attention
    assert least * 0.97 < moved < least * 1.05


@pytest.mark.parametrize("block", [0, 5])
def test_without_drafts_among_its_rows_a_step_needs_no_q(block: int) -> None:
    build = Build(tiny_model(), CAPACITY, block=block)
    assert build_decode(build, 3, 3).nodes[-2].label == (f"draft.{block - 1}.confidence" if block
                                                         else "accept")  # fmt: skip
    for rows, sequences in ((3, 3), (4, 3)):
        plan = build_decode(build, rows, sequences)
        (op,) = [n.op for n in plan.nodes if n.label == "accept"]
        assert (op.q is not None) == (block > 0 and rows > sequences)  # type: ignore[attr-defined]
