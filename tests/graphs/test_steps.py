"""Decode and prefill plans: which layer does what, over which buffers (model.md 4.2, 4.9, 5, 9)."""

from __future__ import annotations

import functools
import re
from typing import TypeVar

import pytest

from helpers.golden_plans import tiny_model
from ultraflash.graphs.capacity import MAX_ROWS, Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import WorldError
from ultraflash.graphs.io import MAX_BIASES
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.ops.all_gather import AllGather
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.ops.attention import Attention
from ultraflash.graphs.ops.candidate_pool import CandidatePool
from ultraflash.graphs.ops.embed import Embed
from ultraflash.graphs.ops.engram_hash import EngramHash
from ultraflash.graphs.ops.engram_mix import EngramMix
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.hc_expand import HcExpand
from ultraflash.graphs.ops.hc_in import HcIn
from ultraflash.graphs.ops.hc_mix import HcMix
from ultraflash.graphs.ops.index_scores import IndexScores
from ultraflash.graphs.ops.ring_write import RingWrite
from ultraflash.graphs.ops.rope_table import RopeTable
from ultraflash.graphs.ops.select_topk import SelectTopk
from ultraflash.graphs.ops.store_index_key import StoreIndexKey
from ultraflash.graphs.ops.store_main_kv import StoreMainKv
from ultraflash.graphs.plan import Life, Op, Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.weights.table import weight_table

CAPACITY = Capacity(slots=3, max_seq=512)
SomeOp = TypeVar("SomeOp", bound=Op)


@functools.cache
def release(rows: int = 1, world: int = 1) -> Plan:
    return build_decode(Build(release_model(), CAPACITY, world=world), rows, 1)


@functools.cache
def tiny(kind: str, world: int = 1) -> Plan:
    build = Build(tiny_model(), CAPACITY, world=world, block=5 if kind == "drafting" else 0)
    if kind in ("prefill", "part"):
        return build_prefill(build, 16, ends=kind == "prefill")
    return build_decode(build, 6, 2)


def found(plan: Plan, kind: type[SomeOp], layer: int | None = None) -> list[SomeOp]:
    """The operations of this kind, of one layer or of all."""
    return [
        n.op
        for n in plan.nodes
        if isinstance(n.op, kind) and (layer is None or n.label.startswith(f"L{layer}."))
    ]


def one(plan: Plan, kind: type[SomeOp], layer: int) -> SomeOp:
    (op,) = found(plan, kind, layer)
    return op


# --- model.md 4.9, typed from its table ---

READS_ENTRIES_OF = {2: range(2, 8), 8: range(8, 14), 14: range(14, 20), 20: range(20, 40)}
REUSES = {2: range(2, 8), 8: range(8, 14), 14: range(14, 20), 20: range(20, 24),
          24: range(24, 28), 28: range(28, 32), 32: range(32, 36), 36: range(36, 40)}  # fmt: skip
RATIO = [0] * 2 + [2] * 18 + [1] * 20


def source(table: dict[int, range], layer: int) -> int:
    return next(s for s, layers in table.items() if layer in layers)


@pytest.mark.parametrize("layer", range(40))
def test_layer_map_of_the_release(layer: int) -> None:
    plan = release()
    attention = one(plan, Attention, layer)
    assert attention.window == 128
    assert attention.ring_codes.name == f"L{layer}.attn.ring_codes"  # its own window
    assert bool(found(plan, StoreMainKv, layer)) == (layer in READS_ENTRIES_OF)
    assert bool(found(plan, StoreIndexKey, layer)) == (layer in READS_ENTRIES_OF)
    assert bool(found(plan, SelectTopk, layer)) == (layer in REUSES)
    assert bool(found(plan, CandidatePool, layer)) == (layer == 20)
    assert bool(found(plan, EngramMix, layer)) == (layer in (1, 14))
    if RATIO[layer] == 0:
        assert attention.sel is attention.main_codes is attention.main_scales is None
        return
    assert attention.sel is not None
    assert attention.main_codes is not None
    assert attention.main_scales is not None
    entries = source(READS_ENTRIES_OF, layer)
    assert attention.main_codes.name == f"L{entries}.attn.main_codes"
    assert attention.main_scales.name == f"L{entries}.attn.main_scales"
    assert attention.sel.name == f"L{source(REUSES, layer)}.attn.sel"


@pytest.mark.parametrize("layer", REUSES)
def test_index_sources_of_the_release(layer: int) -> None:
    """Each scores against the keys of its entries' source, never another's (model.md 4.6)."""
    plan, keys = release(), source(READS_ENTRIES_OF, layer)
    scores, select = one(plan, IndexScores, layer), one(plan, SelectTopk, layer)
    assert scores.codes.name == f"L{keys}.attn.key_codes"
    assert scores.ratio == select.ratio == RATIO[layer]
    assert scores.scale == 2.0**-6
    assert select.k == 512
    if layer <= 20:  # the candidate source's own selection ignores the pool
        assert select.pool is None
    else:
        assert select.pool is not None
        assert select.pool == one(plan, CandidatePool, 20).y
        assert select.block_size == 8
    if layer in READS_ENTRIES_OF:  # a row sees the group that it completes
        nodes = [n.op for n in plan.nodes]
        assert nodes.index(one(plan, StoreIndexKey, layer)) < nodes.index(scores)
        assert nodes.index(one(plan, StoreMainKv, layer)) < nodes.index(one(plan, Attention, layer))


@pytest.mark.parametrize("layer", range(40))
def test_angles_of_the_release(layer: int) -> None:
    """Window-only layers turn by the plain table, others by the compressed one (model.md 3.4)."""
    plan = release()
    made_by = {op.cos.name: op for op in found(plan, RopeTable)}
    own = made_by[one(plan, Attention, layer).cos.name]
    assert own.freq.name == ("rope.compressed" if RATIO[layer] else "rope.plain")
    assert own.offset == 0
    stores: list[StoreMainKv | StoreIndexKey] = [
        *found(plan, StoreMainKv, layer),
        *found(plan, StoreIndexKey, layer),
    ]
    for op in stores:
        group = made_by[op.cos.name]
        assert group.freq.name == "rope.compressed"
        assert group.offset == 1 - RATIO[layer]  # the group's first token


# --- hyper-connections (model.md 4.2) ---


@pytest.mark.parametrize("plan", [release(), tiny("decode"), tiny("prefill")], ids=lambda p: p.name)
def test_input_weights_are_one_sublayer_late(plan: Plan) -> None:
    layers = len(found(plan, Attention))
    (embed,) = found(plan, Embed)
    pre, x = embed.pre, embed.x
    for layer in range(layers):
        if engram := found(plan, EngramMix, layer):
            assert engram[0].x == x
            x = engram[0].y  # after `pre` was computed, before they are mixed
        for taken, mix, expand in zip(
            *(found(plan, kind, layer) for kind in (HcIn, HcMix, HcExpand)), strict=True
        ):
            assert isinstance(taken, HcIn)
            assert isinstance(mix, HcMix)
            assert isinstance(expand, HcExpand)
            assert (taken.x, taken.pre) == (x, pre)
            assert mix.x == expand.x == x
            assert (expand.post, expand.comb) == (mix.post, mix.comb)
            pre, x = mix.pre, expand.y
    *_, last = found(plan, HcCollapse)
    if plan.name == "prefill":
        assert last.pre.name == "last.pre"
    else:
        assert (last.x, last.pre) == (x, pre)


# --- state ---


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_rings_are_written_once_behind_their_last_reader(kind: str) -> None:
    plan = tiny(kind)
    writers = [(i, n.op) for i, n in enumerate(plan.nodes) if isinstance(n.op, RingWrite)]
    at = [(ring.name, i) for i, op in writers for ring in op.writes()]
    written = dict(at)
    assert len(written) == len(at)
    names = [ref.name for ref in plan.of_life(Life.STATE)]
    assert written.keys() == {n for n in names if re.search("ring|history|pending", n)}
    for i, node in enumerate(plan.nodes):
        for ref in node.op.reads():
            if ref.name in written and not isinstance(node.op, RingWrite):
                assert i < written[ref.name], f"{node.label} reads {ref} too late"


@pytest.mark.parametrize("layer", [1, 14])
def test_both_engrams_share_one_history(layer: int) -> None:
    assert one(release(), EngramHash, layer).history.name == "engram.history"


def test_global_bytes_a_token() -> None:
    """890 (model.md 4.12): 288 an entry and 68 a key, at 2.5 entries a token."""
    per_slot = sum(
        ref.nbytes // CAPACITY.slots
        for ref in release().of_life(Life.STATE)
        if re.search("main|key", ref.name)
    )
    assert per_slot == 890 * CAPACITY.max_seq


def test_window_bytes_of_a_slot() -> None:
    """528 a row and layer (model.md 5.2), for a ring that holds a window and rejected rows."""
    ring = CAPACITY.ring(release_model())
    per_slot = sum(
        ref.nbytes // CAPACITY.slots
        for ref in release().of_life(Life.STATE)
        if re.search("ring_", ref.name)
    )
    assert per_slot == 40 * 528 * ring


@pytest.mark.parametrize("model", [release_model(), tiny_model()], ids=["release", "tiny"])
def test_ring_lengths(model: Model) -> None:
    """A power of two that holds a window and the rejected rows of two steps (architecture.md 3)."""
    ring = CAPACITY.ring(model)
    assert ring & (ring - 1) == 0
    assert model.window + 2 * MAX_ROWS <= ring < 2 * (model.window + 2 * MAX_ROWS)


def test_entries_cover_an_odd_context() -> None:
    odd = Capacity(slots=1, max_seq=513)
    assert (odd.entries(1), odd.entries(2)) == (513, 257)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_decode_and_prefill_share_state(kind: str) -> None:
    """One buffer, one shape, whoever names it."""
    assert set(tiny(kind).of_life(Life.STATE)) == set(tiny("decode").of_life(Life.STATE))


# --- io ---


@pytest.mark.parametrize(
    ("plan", "rows", "sequences", "sampled"),
    [
        pytest.param(tiny("decode"), 6, 2, 6, id="decode"),
        pytest.param(tiny("prefill"), 16, 1, 1, id="prefill"),
        pytest.param(tiny("drafting"), 6, 2, 6, id="drafting"),
    ],
)
def test_io_buffers(plan: Plan, rows: int, sequences: int, sampled: int) -> None:
    """Tokens are emitted behind every row of a decode step, behind the last one of a prompt."""
    assert (plan.rows, plan.sequences) == (rows, sequences)
    shapes = {ref.name.removeprefix("io."): (ref.shape, ref.dtype) for ref in plan.of_life(Life.IO)}
    for name in ("ids", "is_image", "position", "slot", "window_start", "banned"):
        assert shapes.pop(name) == ((rows,), "i32")
    for name in ("top_k", "step", "want_logprobs", "token", "accepted"):
        assert shapes.pop(name) == ((sequences,), "i32")
    for name in ("temperature", "top_p"):
        assert shapes.pop(name) == ((sequences,), "f32")
    assert shapes.pop("row_start") == ((sequences + 1,), "i32")
    if plan.name == "decode":
        for name in ("follows", "end", "ban", "ban_end", "kept"):
            assert shapes.pop(name) == ((sequences,), "i32")
    assert shapes.pop("seed") == ((sequences,), "u64")
    assert shapes.pop("mask") == ((rows, 512 // 32), "u32")
    assert shapes.pop("bias_ids") == ((sequences, MAX_BIASES), "i32")
    assert shapes.pop("bias") == ((sequences, MAX_BIASES), "f32")
    assert shapes.pop("logprob") == ((sampled,), "f32")
    assert shapes.pop("top_ids") == ((sampled, 20), "i32")
    assert shapes.pop("top_logprobs") == ((sampled, 20), "f32")
    if "draft.q" in plan.buffers:
        assert shapes.pop("drafts") == ((sequences, 5), "i32")
        assert shapes.pop("confidence") == ((sequences, 5), "f32")
        if plan.name == "decode":
            assert shapes.pop("own") == ((sequences,), "i32")
            assert shapes.pop("threshold") == ((5,), "f32")
            assert shapes.pop("chance") == ((2, 5, 65), "f32")
            assert shapes.pop("price") == ((rows,), "f32")
    assert not shapes


def test_a_part_of_a_prompt_draws_nothing() -> None:
    plan = tiny("part")
    names = {ref.name for ref in plan.of_life(Life.IO)}
    assert names == {
        f"io.{name}"
        for name in ("ids", "is_image", "position", "slot", "row_start", "window_start")
    }


@pytest.mark.parametrize("kind", ["decode", "drafting"])
def test_a_decode_step_verifies_every_row(kind: str) -> None:
    plan = tiny(kind)
    (op,) = found(plan, Accept)
    assert op.logits.shape == (6, 512)
    for name in ("ids", "slot", "position", "row_start", "mask", "banned", "token", "accepted"):
        assert getattr(op, name).name == f"io.{name}"
    assert (op.q is not None) == (kind == "drafting")


def test_a_prefill_draws_behind_its_last_row() -> None:
    """Accept sees a step of one row: the last one, its mask and its ban."""
    (op,) = found(tiny("prefill"), Accept)
    for name in ("ids", "slot", "position", "row_start", "mask", "banned"):
        assert getattr(op, name).name == f"last.{name}"
    assert op.logits.shape == (1, 512)
    assert (op.q, op.temperature.name, op.token.name) == (None, "io.temperature", "io.token")


def test_nothing_that_changes_between_steps_is_a_constant() -> None:
    """Two builds give the same digest, whatever sequences do: a captured graph is never updated."""
    again = build_decode(Build(tiny_model(), CAPACITY), 6, 2)
    assert again.digest() == tiny("decode").digest()


def test_a_prefill_computes_logits_of_one_row() -> None:
    assert tiny("prefill").buffers["head.logits"].shape == (1, 512)
    assert tiny("decode").buffers["head.logits"].shape == (6, 512)


# --- worlds ---


def test_one_rank_exchanges_nothing() -> None:
    for plan in (release(), tiny("decode"), tiny("prefill")):
        assert not found(plan, AllReduce)
        assert not found(plan, AllGather)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_exchange_two_sums_a_layer_index_scores_and_logits(world: int) -> None:
    plan = release(world=world)
    for layer in range(40):
        assert len(found(plan, AllReduce, layer)) == 2 + (layer in REUSES)
    assert len(found(plan, AllGather)) == 1
    for op in found(plan, AllReduce):  # fp32 partial sums
        assert op.x.dtype == "f32"
        assert op.rounded == (op.y.dtype == "bf16")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_weights_are_those_of_the_table_and_split_as_it_says(world: int) -> None:
    model = release_model()
    table, plan = weight_table(model), release(world=world)
    used = {ref.name: ref for ref in plan.of_life(Life.WEIGHT)}
    wanted = {name for name in table if not name.startswith("mtp.")}
    assert used.keys() == wanted
    for name, ref in used.items():
        row = table[name]
        whole = list(row.shape)
        if row.axis is not None:
            whole[row.axis] //= world
        assert ref.shape == tuple(whole), name


@pytest.mark.parametrize("world", [0, 3, 4])
def test_a_world_that_does_not_divide_is_refused(world: int) -> None:
    with pytest.raises(WorldError):
        build_decode(Build(tiny_model(), CAPACITY, world=world), 1, 1)
    with pytest.raises(WorldError):
        build_prefill(Build(tiny_model(), CAPACITY, world=world), 16)


# --- sizes of the release (model.md 2.4 and 9) ---

GROUPS = {
    r"layers\.\d+\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|q_norm|kv_norm|attn_sink)": 5_069_721_600,
    r"layers\.\d+\.ffn\.experts\..*": 288_777_830_400,
    r"layers\.\d+\.ffn\.shared_experts\..*": 1_416_960_000,
    r"layers\.\d+\.ffn\.gate.*": 157_409_280,
    r"layers\.\d+\.attn\.indexer\..*": 45_130_752,
    r"layers\.\d+\.attn\.compressor\..*": 36_704_256,
    r"layers\.\d+\.hc_.*": 157_295_040,
    r"layers\.\d+\.engram\.(wkv|q_weight|k_weight)": 315_043_840,
    r"layers\.\d+\.engram\.embed": 202_758_032_400,
    r"embed": 1_323_827_200,
    r"head": 1_323_827_200,
    r"layers\.\d+\.(attn_norm|ffn_norm)|norm": 829_440,
}


@pytest.mark.parametrize(("names", "nbytes"), GROUPS.items())
def test_stored_bytes_of_a_group(names: str, nbytes: int) -> None:
    weights = release().of_life(Life.WEIGHT)
    assert sum(ref.nbytes for ref in weights if re.fullmatch(names, ref.name)) == nbytes


def test_bytes_of_a_step() -> None:
    """13.03 GB of weights for one row (model.md 9); a short context adds little."""
    assert 13.03e9 < release().cost().nbytes < 13.03e9 * 1.01


def test_a_step_of_more_rows_reads_more_experts_only() -> None:
    """Up to six new experts a row, 18,800,640 bytes each; the rest is activations."""
    more = release(rows=7).cost().nbytes - release().cost().nbytes
    experts = 40 * 36 * 18_800_640
    assert experts < more < experts * 1.02


def test_work_of_a_step() -> None:
    """Two operations a weight used for one row: the sum of model.md 4.11, and the index keys."""
    scores = (Attention, IndexScores)
    nodes = [n.op for n in release().nodes if not isinstance(n.op, scores)]
    assert sum(op.cost().flops for op in nodes) == 2 * (16_129_720_320 + 4 * 128 * 512)
