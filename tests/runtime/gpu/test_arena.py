"""Scratch memory: buffers that live at the same time never share a byte."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ops import io, scratch
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Op, Plan, PlanBuilder, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.gpu.arena import ALIGNMENT, Arena, Place


@dataclass(frozen=True)
class Step(Op):
    """Reads up to two buffers, writes one or two."""

    OUT: ClassVar[tuple[str, ...]] = ("y", "z")
    a: Ref | None
    b: Ref | None
    y: Ref
    z: Ref | None = None


Shape = tuple[int, list[int], int | None]  # bytes written, which earlier are read, more written


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Nodes that read what any earlier node wrote."""
    b = PlanBuilder("toy", 1, 1)
    written: list[Ref] = []
    group: list[Ref] = []  # written by nodes that run side by side
    for number in range(draw(st.integers(1, 24))):
        known = st.sampled_from(written) if written else st.none()
        read = [draw(st.one_of(st.none(), known)) for _ in range(2)]
        out = [scratch(f"y{number}", draw(st.integers(1, 2000)), dtype="u8")]
        if draw(st.booleans()):
            out.append(scratch(f"z{number}", draw(st.integers(1, 600)), dtype="bf16"))
        # Beside the node in front: what that, and those it is beside, wrote is not read.
        beside = number > 0 and draw(st.booleans())
        if beside:
            read = [None if ref in group else ref for ref in read]
        else:
            group = []
        b.add(f"n{number}", Step(read[0], read[1], *out), beside=beside)
        group += out
        written += out
    return b.build()


def overlap(a: Place, b: Place) -> bool:
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size


def live_together(a: Place, b: Place) -> bool:
    return a.first <= b.last and b.first <= a.last


def assert_sound(plan: Plan, arena: Arena) -> None:
    """By lifetimes counted here: from the node that writes a buffer to the last that touches it;
    nodes that run side by side are one.
    """
    placed = {place.name: place for place in arena.places}
    assert placed.keys() == {ref.name for ref in plan.of_life(Life.SCRATCH)}
    assert len(placed) == len(arena.places)
    touched: dict[str, list[int]] = {}
    number = -1
    for node in plan.nodes:
        number += 0 if node.beside else 1
        for _, ref in node.op.refs:
            touched.setdefault(ref.name, []).append(number)
    for name, place in placed.items():
        touching = touched[name]
        assert (place.first, place.last) == (touching[0], touching[-1])
        assert plan.buffers[name].nbytes <= place.size
        assert place.offset % ALIGNMENT == 0
        assert 0 <= place.offset <= arena.size - place.size
    assert arena.size == max((p.offset + p.size for p in arena.places), default=0)


@given(plans())
def test_no_two_live_buffers_overlap(plan: Plan) -> None:
    arena = Arena.of(plan)
    assert_sound(plan, arena)
    for a, b in combinations(arena.places, 2):
        assert not (live_together(a, b) and overlap(a, b)), (a, b)


@given(plans())
def test_every_buffer_lies_at_the_first_place_where_it_fits(plan: Plan) -> None:
    """Nothing lower is free among those placed before it: the plan alone decides."""
    places = Arena.of(plan).places
    for number, place in enumerate(places):
        busy = [p for p in places[:number] if live_together(p, place)]
        for offset in {0, *(p.offset + p.size for p in busy)}:
            if offset < place.offset:
                lower = Place(place.name, offset, place.size, place.first, place.last)
                assert any(overlap(lower, p) for p in busy)


@given(plans())
def test_the_same_plan_lies_the_same_way(plan: Plan) -> None:
    assert Arena.of(plan) == Arena.of(plan)


@given(plans())
def test_with_everything_kept_nothing_is_shared(plan: Plan) -> None:
    arena = Arena.of(plan, keep_all=True)
    assert_sound(plan, arena)
    assert not any(overlap(a, b) for a, b in combinations(arena.places, 2))
    assert arena.size == sum(p.size for p in arena.places)


def test_a_chain_needs_two_buffers_at_a_time() -> None:
    b, x = PlanBuilder("chain", 1, 1), io("x", 1000, dtype="u8")
    for number in range(50):
        y = scratch(f"y{number}", 1000, dtype="u8")
        b.add(f"n{number}", Step(x, None, y))
        x = y
    assert Arena.of(b.build()).size == 2 * 1024


def test_a_plan_without_scratch_needs_nothing() -> None:
    b = PlanBuilder("io", 1, 1)
    b.add("n", Step(io("x", 1), None, io("y", 1)))
    arena = Arena.of(b.build())
    assert arena == Arena((), 0)
    assert arena.report() == "scratch 0 bytes for 0 buffers of 0 bytes"


@pytest.mark.parametrize("model", [Model.from_checkpoint(BUNDLED_CHECKPOINT), release_model()])
def test_of_a_decode_step(model: Model) -> None:
    plan = build_decode(Build(model, Capacity(5, 4096), block=model.draft_block), 8, 1)
    arena = Arena.of(plan)
    assert_sound(plan, arena)
    ordered = sorted(arena.places, key=lambda p: p.offset)
    for number, a in enumerate(ordered):
        for b in ordered[number + 1 :]:
            if b.offset >= a.offset + a.size:
                break
            assert not live_together(a, b), (a, b)
    assert arena.size < sum(p.size for p in arena.places) / 10


def test_the_report_names_the_largest_first() -> None:
    b = PlanBuilder("toy", 1, 1)
    b.add("n", Step(None, None, scratch("small", 1, dtype="u8"), scratch("large", 9000)))
    lines = Arena.of(b.build()).report().splitlines()
    assert lines[0] == "scratch 18,432 bytes for 2 buffers of 18,432 bytes"
    assert [line.split()[-1] for line in lines[1:]] == ["large", "small"]
    assert lines[1].split()[:3] == ["18,176", "at", "256"]
