"""Prefill without the decoder (model.md 4.10): what it leaves, bit by bit.

Up to `tail` tokens it is the full prefill. Above, the yardstick is the full plan over all rows at
once, in which the replayed layers' windows of the last rows begin with the tail: nothing of the two
CED plans takes part in it. tiny-a has a window of 16 and a decoder of layers 6 to 9.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from helpers.ced import TAIL, ced, ids_of, masked
from helpers.drafting import Behind, DraftRig, assert_same_result
from helpers.golden_plans import tiny_model
from helpers.rig import assert_bits, assert_same_bits
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import ConfigError, WorldError
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.ops.attention import Attention
from ultraflash.graphs.ops.engram_mix import EngramMix
from ultraflash.graphs.ops.ring_read import RingRead
from ultraflash.graphs.ops.ring_write import RingWrite
from ultraflash.graphs.ops.store_main_kv import StoreMainKv
from ultraflash.graphs.plan import Life, Op, Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.step_io import Draw, Part

MORE = 20
FULL, CED = 0, 1  # slots
SAMPLED = Draw(temperature=1.3, top_p=0.9, seed=77)
modes = pytest.mark.parametrize("mode", ["ced20", "ced21"])


@pytest.fixture(scope="module")
def one() -> DraftRig:
    return DraftRig()


@pytest.fixture(scope="module")
def two() -> DraftRig:
    return DraftRig(world=2)


def assert_as_good(rig: DraftRig, length: int, got: Behind, want: Behind, where: str) -> None:
    """The same result, the same live state, and the same 20 greedy tokens with their drafts."""
    assert_same_result(got, want, where)
    assert_same_bits(rig.live(CED, length), rig.live(FULL, length), where)
    token = want.token
    for more in range(MORE):  # side by side, which saves a third
        parts = [Part(slot, length + more, [token]) for slot in (CED, FULL)]
        got, want = rig.decode(*parts)
        assert_same_result(got, want, f"{where} + {more + 1}")
        token = want.token
    length += MORE
    assert_same_bits(rig.live(CED, length), rig.live(FULL, length), f"{where} + {MORE}")


# --- equal to the full prefill ---


def check_full(rig: DraftRig, mode: str, length: int) -> None:
    ids = ids_of(length, length)
    want, got = rig.prefill(FULL, ids), ced(rig, CED, ids, mode, (7, 32))
    assert_as_good(rig, length, got, want, f"{mode} {length}")


@modes
@pytest.mark.parametrize("length", [1, 23, 24])
def test_up_to_the_tail_it_is_the_full_prefill(one: DraftRig, mode: str, length: int) -> None:
    check_full(one, mode, length)


@modes
def test_on_two_ranks(two: DraftRig, mode: str) -> None:
    check_masked(two, mode, 41)
    ids = ids_of(24, 24)
    assert_same_result(ced(two, CED, ids, mode, (7,)), two.prefill(FULL, ids))
    assert_same_bits(two.live(CED, 24), two.live(FULL, 24))


@modes
@pytest.mark.parametrize(("length", "tail"), [(75, 75), (80, 128)])
def test_a_longer_tail_covers_a_longer_prompt(mode: str, length: int, tail: int) -> None:
    """Beyond window, selections, pool and the rings of 64."""
    rig, ids = DraftRig(), ids_of(length, length)
    assert_same_result(ced(rig, CED, ids, mode, (7, 32), tail), rig.prefill(FULL, ids))
    assert_same_bits(rig.live(CED, length), rig.live(FULL, length))


@modes
def test_above_the_tail_it_is_not(one: DraftRig, mode: str) -> None:
    """Otherwise the comparisons below would say nothing."""
    ids = ids_of(100, 100)
    full, got = one.prefill(FULL, ids), ced(one, CED, ids, mode)
    assert np.abs(got.logits - full.logits).max() > 1e-3


# --- equal to the masked computation ---


def check_masked(rig: DraftRig, mode: str, length: int) -> None:
    ids = ids_of(length, length)
    want, got = masked(rig, FULL, ids, mode), ced(rig, CED, ids, mode)
    assert_as_good(rig, length, got, want, f"{mode} {length}")


def check_prefill(
    rig: DraftRig, mode: str, length: int, cuts: tuple[int, ...] = (16,), tail: int = TAIL
) -> None:
    """Result and live state; what equal state leads to is said elsewhere."""
    ids, where = ids_of(length, length), f"{mode} {length} in {cuts} of {tail}"
    want, got = masked(rig, FULL, ids, mode, tail), ced(rig, CED, ids, mode, cuts, tail)
    assert_same_result(got, want, where)
    assert_same_bits(rig.live(CED, length), rig.live(FULL, length), where)


@modes
@pytest.mark.parametrize("length", [25, 130])
def test_above_the_tail_it_is_the_masked_prefill(one: DraftRig, mode: str, length: int) -> None:
    check_masked(one, mode, length)


@modes
@pytest.mark.parametrize("tail", [16, 33, 64])
def test_any_tail(mode: str, tail: int) -> None:
    """From the window on: a ring of rows for the replay fits it at any length."""
    check_prefill(DraftRig(), mode, 100 + tail % 3, tail=tail)


@modes
@pytest.mark.parametrize(
    ("length", "cuts"),
    [
        (30, (1,)), (64, (4, 3)), (98, (24,)), (130, (5, 40)),
        (101, (32,)), (97, (33,)), (130, (77, 2)), (131, (128,)),
    ],
)  # fmt: skip
def test_any_chunking_of_the_encoder_part(
    one: DraftRig, mode: str, length: int, cuts: tuple[int, ...]
) -> None:
    """Chunks shorter and longer than the tail and than the ring that feeds the replay."""
    check_prefill(one, mode, length, cuts)


@modes
@pytest.mark.parametrize("length", [20, 61])
def test_sampled_drafts_and_what_they_were_drawn_from(
    one: DraftRig, mode: str, length: int
) -> None:
    ids = ids_of(length, length)
    want = masked(one, FULL, ids, mode, draw=SAMPLED)
    got = ced(one, CED, ids, mode, draw=SAMPLED)
    assert_same_result(got, want)
    assert_bits(one.drawn_from(CED), one.drawn_from(FULL), "q")
    assert np.allclose(one.drawn_from(CED).sum(axis=1), 1)


@modes
def test_a_used_slot_is_as_good_as_new(one: DraftRig, mode: str) -> None:
    """A longer prompt went through the same rings; another slot prefills in between."""
    ids, other = ids_of(40, 40), ids_of(41, 90)
    want = masked(one, FULL, ids, mode)
    ced(one, CED, other, mode)
    ced(one, 2, other, mode)
    assert_same_result(ced(one, CED, ids, mode), want)
    assert_same_bits(one.live(CED, 40), one.live(FULL, 40))


@modes
@pytest.mark.parametrize("length", [61])
def test_other_slots_are_left_alone(one: DraftRig, mode: str, length: int) -> None:
    ced(one, CED, ids_of(1, 50), mode)
    one.prefill(2, ids_of(2, 50))
    before = {name: array.copy() for rank in one.backend._state for name, array in rank.items()}
    ced(one, 3, ids_of(length, length), mode)
    for name, array in one.backend._state[0].items():
        assert_bits(array[:3], before[name][:3], name)


# --- what the plans are made of ---

CAPACITY = Capacity(slots=3, max_seq=256)
RELEASE = Build(release_model(), CAPACITY, block=5)
LAYERS = {"ced20": 20, "ced21": 21}


@functools.cache
def release(mode: str) -> tuple[Plan, Plan]:
    """Encode and replay."""
    return build_encode(RELEASE, mode, 136, 128), build_replay(RELEASE, mode, 136)


def found(plan: Plan, kind: type[Op]) -> list[tuple[str, Op]]:
    return [(n.label, n.op) for n in plan.nodes if isinstance(n.op, kind)]


def layers_of(plan: Plan) -> set[int]:
    """Numbers of the layers whose experts run."""
    return {int(n.label[1:].split(".")[0]) for n in plan.nodes if n.label.endswith(".ffn.gate")
            and n.label.startswith("L")}  # fmt: skip


@modes
def test_layers_of_the_release(mode: str) -> None:
    """CED-20: 0-19 on all tokens, 20-39 on the tail; CED-21: 0-20 and 21-39."""
    encode, replay = release(mode)
    start = LAYERS[mode]
    assert layers_of(encode) == set(range(start))
    assert layers_of(replay) == set(range(start, 40))
    assert len(found(encode, Attention)) == start
    # Layer 20's entries and keys are made for every token in both.
    assert [label for label, _ in found(encode, StoreMainKv)] == [
        f"L{n}.attn.store_kv" for n in (2, 8, 14, 20)
    ]
    assert not found(replay, StoreMainKv)
    assert not found(replay, EngramMix)
    assert not found(encode, Accept)
    assert len(found(replay, Accept)) == 1


@modes
def test_what_is_carried_into_the_replay(mode: str) -> None:
    """Streams and input weights; from CED-21's exact layer 20 selections and pools too."""
    encode, replay = release(mode)
    before = LAYERS[mode] - 1
    names = {f"replay.L{before}.X", f"replay.L{before}.ffn.pre"}
    if mode == "ced21":
        names |= {"replay.L20.attn.sel", "replay.L20.attn.pool"}
    written = [ring.name for _, op in found(encode, RingWrite) for ring in op.writes()]
    assert {n for n in written if n.startswith("replay.")} == names
    read = [op for _, op in found(replay, RingRead) if isinstance(op, RingRead)]
    assert {op.ring.name for op in read} == names
    for op in read:
        assert op.ring.shape[1] == 256  # a power of two that holds 136 rows


@modes
def test_a_replay_ends_as_every_prefill_does(mode: str) -> None:
    """Accept, then a block of drafts, behind the last row; rings of all draft stages are seeded."""
    (_, replay), prefill = release(mode), build_prefill(RELEASE, 136)
    for kind in ("last", "head", "accept", "context", "draft"):
        got, want = ([n.label for n in plan.nodes[plan.span(kind)]] for plan in (replay, prefill))
        assert got == want


@modes
def test_state_is_that_of_the_other_plans(mode: str) -> None:
    """One buffer, one shape, whoever names it; only the replay's own rings are new."""
    build = Build(tiny_model(), CAPACITY, block=5)
    known = {r.name: r for r in build_decode(build, 2, 1).of_life(Life.STATE)}
    encode, replay = (
        {r.name: r for r in plan.of_life(Life.STATE)}
        for plan in (build_encode(build, mode, TAIL, 16), build_replay(build, mode, TAIL))
    )
    for mine in (encode, replay):
        others = {n: r for n, r in mine.items() if not n.startswith("replay.")}
        assert others.items() <= known.items()
        assert all(encode[n] == r for n, r in mine.items() if n not in others)
    # Together they fill all that a decode step reads.
    assert encode.keys() | replay.keys() >= known.keys()


@modes
def test_it_saves_what_it_should(mode: str) -> None:
    """Weights read for a chunk: those of half the layers."""
    full = build_prefill(RELEASE, 128).cost().nbytes
    encode = release(mode)[0].cost().nbytes
    assert 0.45 * full < encode < 0.55 * full


@modes
def test_a_world_that_does_not_divide_is_refused(mode: str) -> None:
    build = replace(Build(tiny_model(), CAPACITY), world=3)
    with pytest.raises(WorldError):
        build_encode(build, mode, TAIL, 16)
    with pytest.raises(WorldError):
        build_replay(build, mode, TAIL)


@pytest.mark.parametrize(
    ("field", "layers", "named"),
    [("engram_layers", (1, 7), r"\[7\]"), ("draft_targets", (3, 8, 9), r"\[3\]")],
)
@modes
def test_a_model_whose_halves_are_mixed_is_refused(
    mode: str, field: str, layers: tuple[int, ...], named: str
) -> None:
    """A replay would leave such a layer's part out without a word."""
    mixed = replace(tiny_model(), **{field: layers})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{mode} replays layers .*{named}.*use prefill full"):
        build_encode(Build(mixed, CAPACITY, block=5), mode, TAIL, 16)


@modes
def test_without_drafting(mode: str) -> None:
    build = Build(tiny_model(), CAPACITY)
    replay = build_replay(build, mode, TAIL)
    assert not [n for n in replay.nodes if n.label.startswith(("draft", "context"))]
    assert "draft.q" not in replay.buffers
