"""Plans as data: what the builder refuses, and what text, digest, span and cost say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from helpers.ops import io, scratch, state, weight
from ultraflash.graphs.errors import PlanError
from ultraflash.graphs.plan import Cost, Life, Op, Plan, PlanBuilder, Ref


@dataclass(frozen=True)
class Copy(Op):
    """y = x."""

    x: Ref
    y: Ref
    times: int = 1


@dataclass(frozen=True)
class Store(Op):
    """Rows of x enter a state."""

    OUT = ()
    UPDATES = ("into",)
    x: Ref
    into: Ref


@dataclass(frozen=True)
class Split(Op):
    """Two results."""

    OUT = ("low", "high")
    x: Ref
    low: Ref
    high: Ref


IN, W, RING = io("io.in", 2), weight("w", 2, dtype="i32"), state("ring", 4, 8)
A, B, C, D, E = (scratch(n, 2, dtype="i32") for n in "abcde")
A_IO, W_STATE = io("io.rows", 2), state("kept", 4, 8)


def builder(*ops: Op) -> PlanBuilder:
    b = PlanBuilder("toy", rows=2, sequences=1)
    for number, op in enumerate(ops):
        b.add(f"n{number}", op)
    return b


# --- what is refused ---


def test_reading_scratch_that_nobody_wrote() -> None:
    with pytest.raises(PlanError, match=r"^n1 reads b\[2\]:i32 before any node wrote it$"):
        builder(Copy(IN, A), Copy(B, C))


def test_reading_scratch_that_the_same_node_writes() -> None:
    with pytest.raises(PlanError, match=r"^n0 reads a\[2\]:i32 before any node wrote it$"):
        builder(Copy(A, A))


def test_writing_scratch_twice() -> None:
    with pytest.raises(PlanError, match=r"^n2 writes a\[2\]:i32, which an earlier node wrote"):
        builder(Copy(IN, A), Copy(A, B), Copy(B, A))


def test_two_results_in_one_buffer() -> None:
    with pytest.raises(PlanError, match=r"^n0 writes a\[2\]:i32"):
        builder(Split(IN, A, A))


@pytest.mark.parametrize("op", [Copy(IN, W), Store(IN, W)])
def test_writing_a_weight(op: Op) -> None:
    with pytest.raises(PlanError, match=r"^n0 writes the weight w\[2\]:i32$"):
        builder(op)


@pytest.mark.parametrize(
    "other",
    [replace(A, shape=(3,)), replace(A, dtype="f32"), replace(A, life=Life.IO)],
    ids=["shape", "dtype", "lifetime"],
)
def test_one_buffer_under_two_descriptions(other: Ref) -> None:
    with pytest.raises(PlanError, match=r"^n1 uses a\[.*known as a\[2\]:i32 \(scratch\)$"):
        builder(Copy(IN, A), Copy(other, B))
    with pytest.raises(PlanError, match=r"^n1 uses a\["):
        builder(Copy(IN, A), Copy(IN, other))


def test_an_empty_plan() -> None:
    with pytest.raises(PlanError, match=r"^plan toy has no nodes$"):
        builder().build()


# --- what is allowed ---


def test_state_and_io_may_be_read_unwritten_and_written_twice() -> None:
    plan = builder(Store(IN, RING), Store(W, RING), Copy(RING, A), Copy(A, IN)).build()
    assert [n.label for n in plan.nodes] == ["n0", "n1", "n2", "n3"]


def test_builder_makes_buffers_of_each_lifetime() -> None:
    b = PlanBuilder("toy", 1, 1)
    made = [getattr(b, life.value)("x", (2, 3), "f32") for life in Life]
    assert made == [Ref("x", (2, 3), "f32", life) for life in Life]


def test_buffers_in_order_of_first_use() -> None:
    plan = builder(Copy(IN, A), Copy(W, B), Split(B, C, scratch("d", 2))).build()
    assert list(plan.buffers) == ["io.in", "a", "w", "b", "c", "d"]
    assert plan.of_life(Life.WEIGHT) == [W]
    assert plan.of_life(Life.SCRATCH) == [A, B, C, scratch("d", 2)]
    assert plan.of_life(Life.STATE) == []


def test_a_plan_does_not_change_with_its_builder() -> None:
    b = builder(Copy(IN, A))
    plan = b.build()
    b.add("later", Copy(A, B))
    assert len(plan.nodes) == 1
    assert "b" not in plan.buffers


# --- nodes beside others ---


def test_what_may_stand_beside() -> None:
    b = builder(Copy(IN, A), Copy(A, B))
    b.add("n2", Copy(A, C), beside=True)
    b.add("n3", Store(A, RING), beside=True)  # beside both
    assert [node.beside for node in b.build().nodes] == [False, False, True, True]


@pytest.mark.parametrize(
    ("op", "touched"),
    [(Copy(B, E), "b"), (Store(C, W_STATE), "c"), (Store(A, RING), "ring")],
    ids=["reads what it writes", "reads what one beside it writes", "writes the same"],
)
def test_what_may_not_stand_beside(op: Op, touched: str) -> None:
    b = builder(Copy(IN, A))
    b.add("first", Split(A, B, D))
    b.add("other", Copy(A, C), beside=True)
    b.add("more", Store(A, RING), beside=True)
    with pytest.raises(PlanError, match=rf"^last cannot run beside .*: both touch {touched}$"):
        b.add("last", op, beside=True)


def test_writing_what_the_node_in_front_reads() -> None:
    b = builder(Store(A_IO, RING), Copy(RING, A))
    with pytest.raises(PlanError, match=r"^last cannot run beside n1: both touch ring$"):
        b.add("last", Store(A_IO, RING), beside=True)


def test_nothing_stands_beside_nothing() -> None:
    with pytest.raises(PlanError, match=r"^n0 stands first"):
        PlanBuilder("toy", 2, 1).add("n0", Copy(IN, A), beside=True)


# --- text and digest ---


def toy() -> Plan:
    b = PlanBuilder("toy", rows=2, sequences=1, world=4)
    b.add("first", Copy(IN, A, times=3))
    b.add("second", Split(A, B, C))
    b.add("third", Store(A, RING), beside=True)
    return b.build()


def test_text_is_one_readable_line_a_node() -> None:
    assert toy().text() == (
        "plan toy rows=2 sequences=1 world=4\n"
        "   0 first                        a[2]:i32 = Copy(io.in) times=3\n"
        "   1 second                       b[2]:i32, c[2]:i32 = Split(a)\n"
        "   2 third                        ring[4,8]:u8 = Store(a)  beside\n"
    )


def test_equal_plans_have_equal_text_and_digest() -> None:
    assert toy().text() == toy().text()
    assert toy().digest() == toy().digest()


CHANGES: dict[str, Callable[[], PlanBuilder]] = {
    "name": lambda: _first(PlanBuilder("other", 2, 1)),
    "rows": lambda: _first(PlanBuilder("toy", 3, 1)),
    "sequences": lambda: _first(PlanBuilder("toy", 2, 2)),
    "world": lambda: _first(PlanBuilder("toy", 2, 1, 2)),
    "label": lambda: _first(PlanBuilder("toy", 2, 1), label="m0"),
    "constant": lambda: builder(Copy(IN, A, times=2)),
    "buffer": lambda: builder(Copy(IN, B)),
    "input": lambda: builder(Copy(W, A)),
    "shape_of_an_input": lambda: builder(Copy(replace(IN, shape=(7,)), A)),
    "dtype_of_an_input": lambda: builder(Copy(replace(IN, dtype="f32"), A)),
    "lifetime_of_an_input": lambda: builder(Copy(replace(IN, life=Life.STATE), A)),
    "shape_of_an_output": lambda: builder(Copy(IN, replace(A, shape=(2, 1)))),
    "one_more_node": lambda: builder(Copy(IN, A), Copy(IN, B)),
    "another_op": lambda: builder(Split(IN, A, B)),
    "beside": lambda: _second(beside=True),
    "not_beside": lambda: _second(beside=False),
}


def _first(b: PlanBuilder, label: str = "n0") -> PlanBuilder:
    b.add(label, Copy(IN, A))
    return b


def _second(*, beside: bool) -> PlanBuilder:
    b = builder(Copy(IN, A))
    b.add("n1", Copy(IN, B), beside=beside)
    return b


def test_beside_or_behind_makes_two_digests() -> None:
    assert _second(beside=True).build().digest() != _second(beside=False).build().digest()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_digest_changes_with_any_change(change: Callable[[], PlanBuilder]) -> None:
    assert change().build().digest() != builder(Copy(IN, A)).build().digest()


def test_the_order_of_nodes_counts() -> None:
    one, other = builder(Copy(IN, A), Copy(IN, B)), builder(Copy(IN, B), Copy(IN, A))
    assert one.build().digest() != other.build().digest()


# --- span ---


def labelled(*labels: str) -> Plan:
    b = PlanBuilder("toy", 1, 1)
    for number, label in enumerate(labels):
        b.add(label, Copy(IN, scratch(f"s{number}", 1)))
    return b.build()


def test_span_takes_a_label_and_what_is_below_it() -> None:
    plan = labelled("L1", "L1.attn", "L1.attn.q", "L10.attn", "L2.ffn")
    assert plan.span("L1") == slice(0, 3)  # L10 is another layer
    assert plan.span("L1.attn") == slice(1, 3)
    assert plan.span("L10") == slice(3, 4)
    assert plan.span("L2.ffn") == slice(4, 5)


def test_span_refuses_what_is_not_there_or_scattered() -> None:
    plan = labelled("L1.a", "L2.a", "L1.b")
    for prefix in ("L3", "L1", "L2.a.x", "L"):
        with pytest.raises(PlanError, match=rf"no contiguous nodes labelled '{prefix}'"):
            plan.span(prefix)


# --- sizes ---


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((), "i32", 4),
        ((3, 5), "f32", 60),
        ((3, 5), "bf16", 30),
        ((7,), "u8", 7),
        ((2, 2), "u32", 16),
        ((3,), "i64", 24),
        ((3,), "u64", 24),
        ((64, 96), "fp8", 64 * 96 + 2 * 3),
        ((33, 40), "fp8", 33 * 40 + 2 * 2),  # blocks at the edge are whole
        ((5, 64, 96), "fp8", 5 * (64 * 96 + 6)),
        ((16, 64), "fp4", 16 * 32 + 16 * 2),
        ((3, 16, 64), "fp4", 3 * (16 * 32 + 16 * 2)),
        ((10, 256), "rows8", 10 * 264),
    ],
)
def test_stored_bytes(shape: tuple[int, ...], dtype: str, nbytes: int) -> None:
    assert Ref("x", shape, dtype, Life.WEIGHT).nbytes == nbytes


def test_cost_is_the_sum_of_the_nodes() -> None:
    plan = toy()
    assert plan.cost() == Cost(8 + 8 + 8 + 8 + 8 + 8, 0)
    assert Cost(1, 2) + Cost(10, 20) == Cost(11, 22)


def test_a_buffer_prints_as_the_plan_shows_it() -> None:
    assert str(RING) == "ring[4,8]:u8"
    assert str(scratch("n", dtype="i32")) == "n[]:i32"
