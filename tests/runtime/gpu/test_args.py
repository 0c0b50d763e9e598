"""The declaration of `Args` and its bytes agree, by C's own rules."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest

from helpers.c_struct import Layout, defines
from helpers.compiler import device_nodes
from helpers.ops import io, scratch, state, weight
from ultraflash import ptx
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.exchange import PIECE
from ultraflash.graphs.ops.all_gather import AllGather
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.served import Served
from ultraflash.graphs.step import Build
from ultraflash.runtime.gpu.args import pack, struct_text
from ultraflash.runtime.gpu.exchange import MAX_WORLD, Exchange, pieces


@dataclass(frozen=True)
class Toy(Op):
    """Everything that an operation may have, in an order that needs padding."""

    UPDATES: ClassVar[tuple[str, ...]] = ("ring",)
    count: int
    x: Ref
    on: bool
    w: Ref
    table: Ref | None
    eps: float
    ring: Ref
    y: Ref
    off: bool = False
    bias: Ref | None = None


EXCHANGE, TURN = Exchange(((1 << 63) + 1, 2, 3 << 40), 2, 2500), 7


def toy(**changed: object) -> Toy:
    values: dict[str, object] = {
        "count": 7,
        "x": scratch("x", 3, 64),
        "on": True,
        "w": weight("w", 96, 64, dtype="fp8"),
        "table": None,
        "eps": 1e-20,
        "ring": state("ring", 2, 256, 5, dtype="f32"),
        "y": io("y", 3, dtype="u64"),
    }
    return Toy(**(values | changed))  # type: ignore[arg-type]


def addresses() -> Callable[[Ref], tuple[int, ...]]:
    """Another one for every buffer, all in the upper half of 64 bits."""
    known: dict[str, int] = {}
    return lambda ref: (
        base := known.setdefault(ref.name, (1 << 63) + 4096 * len(known)),
        base + 1024,
    )


def expected(op: Op, address: Callable[[Ref], tuple[int, ...]]) -> dict[str, object]:
    """Every member's value as an operation's fields give it."""
    values: dict[str, object] = {}
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Ref):
            values[f.name] = address(value)[0]
            if value.dtype in ("fp8", "fp4", "rows8"):
                values[f"{f.name}_scale"] = address(value)[1]
            values |= {f"{f.name}_{axis}": size for axis, size in enumerate(value.shape)}
        else:
            values[f.name] = 0 if value is None else value
    if op.COLLECTIVE:
        inboxes = [*EXCHANGE.inboxes, *[0] * MAX_WORLD][:MAX_WORLD]
        values |= {f"exchange.inbox[{rank}]": at for rank, at in enumerate(inboxes)}
        named = {"rank": 2, "world": 3, "stage": TURN % 3, "capacity": PIECE, "hop_ns": 2500}
        values |= {f"exchange.{name}": value for name, value in named.items()}
    return values


def unpacked(layout: Layout, raw: bytes) -> dict[str, object]:
    """Every member's value as a kernel would read it."""
    code = {8: "<Q", 4: "<i"}
    return {
        name: struct.unpack_from("<f" if m.kind == "float" else code[m.size], raw, m.offset)[0]
        for name, m in layout.members.items()
    }


def assert_agree(op: Op) -> Layout:
    layout, address = Layout.of(struct_text(op)), addresses()
    raw = pack(op, address, EXCHANGE, TURN)
    assert len(raw) == layout.size
    want = {
        name: struct.unpack("<f", struct.pack("<f", v))[0] if isinstance(v, float) else v
        for name, v in expected(op, address).items()
    }
    assert unpacked(layout, raw) == want
    return layout


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"table": weight("table", 5, 32, dtype="rows8")},
        {"bias": weight("bias", 96, dtype="f32")},
        {"x": scratch("x", 3)},
        {"w": weight("w", 4, 96, 64, dtype="fp4")},
        {"count": -1, "on": False, "off": True},
        {"count": 2**31 - 1, "eps": -0.0},
    ],
    ids=lambda changed: " ".join(changed),
)
def test_text_and_bytes_agree(changed: dict[str, object]) -> None:
    assert_agree(toy(**changed))


def test_text_and_bytes_agree_for_every_operation_of_the_release() -> None:
    """The compiler's own word on the same is asked for in tests/ptx/test_compile.py."""
    build = Build(release_model(), Capacity(5, 1 << 20), block=5)
    plans = [
        plan
        for of in (build, replace(build, world=8))
        for plan in Served((1, 8), (1, 2), chunks=(16, 1024), prefill="ced21").plans(of)
    ]
    ops = {n.op for n in device_nodes(plans)}
    assert {op.stem() for op in ops} == set(ptx.stems())
    for op in ops:
        assert_agree(op)


def test_pointers_carry_their_formats_and_only_outputs_are_written() -> None:
    members = Layout.of(struct_text(toy(table=weight("t", 5, 32, dtype="fp4")))).members
    kinds = {name: (m.const, m.kind) for name, m in members.items() if m.pointed}
    assert kinds == {
        "x": (True, "bf16*"),
        "w": (True, "fp8*"),
        "w_scale": (True, "u8*"),
        "table": (True, "fp4*"),
        "table_scale": (True, "u8*"),
        "ring": (False, "float*"),
        "y": (False, "u64*"),
        "bias": (True, "void*"),
    }


def test_pointers_stand_first_so_that_nothing_is_padded_between_them() -> None:
    offsets = [m.offset for m in Layout.of(struct_text(toy())).members.values() if m.pointed]
    assert offsets == list(range(0, 8 * len(offsets), 8))


def test_defines_tell_what_is_there() -> None:
    found = defines(struct_text(toy(bias=weight("b", 96, dtype="f32"))))
    assert {k: v for k, v in found.items() if not k.startswith("UF_SIZE")} == {
        "UF_HAS_x": "1", "UF_SCALED_x": "0",
        "UF_HAS_w": "1", "UF_SCALED_w": "1",
        "UF_HAS_table": "0",
        "UF_HAS_ring": "1", "UF_SCALED_ring": "0",
        "UF_HAS_y": "1", "UF_SCALED_y": "0",
        "UF_HAS_bias": "1", "UF_SCALED_bias": "0",
    }  # fmt: skip
    assert found["UF_SIZE_ring"] == "((i64)a.ring_0 * a.ring_1 * a.ring_2)"


def test_shapes_and_constants_do_not_make_another_kernel() -> None:
    other = toy(count=8, eps=0.5, x=scratch("other", 8, 128), on=False)
    assert struct_text(toy()) == struct_text(other)
    for changed in ({"bias": weight("b", 96)}, {"x": scratch("x", 3, 64, dtype="f32")}):
        assert struct_text(toy()) != struct_text(toy(**changed))


def test_an_extent_that_no_int_holds_is_an_error_and_never_wraps() -> None:
    with pytest.raises(struct.error):
        pack(toy(x=scratch("x", 2**31)), addresses())


@dataclass(frozen=True)
class Shared(Toy):
    COLLECTIVE: ClassVar[bool] = True


def test_what_a_collective_gets_beside_its_buffers() -> None:
    layout = assert_agree(Shared(**vars(toy())))
    assert list(layout.members)[-1] == "exchange.hop_ns"
    assert "exchange.rank" not in assert_agree(toy()).members


def test_stages_follow_each_other_round() -> None:
    op = Shared(**vars(toy()))
    stage = Layout.of(struct_text(op)).members["exchange.stage"].offset
    raw = [pack(op, addresses(), EXCHANGE, turn) for turn in range(5)]
    assert [struct.unpack_from("<i", r, stage)[0] for r in raw] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("rows", "world", "summed", "gathered"),
    [
        (1, 2, 1, 1),
        (PIECE, 2, 1, 1),
        (PIECE + 1, 2, 2, 2),
        (3 * PIECE, 2, 4, 3),
        (3 * PIECE, 8, 2, 3),
    ],
)
def test_a_long_message_takes_several_turns(
    rows: int, world: int, summed: int, gathered: int
) -> None:
    x, y = (scratch(name, rows, 1, dtype="f32") for name in "xy")
    assert pieces(AllReduce(x, y, True), world) == summed
    assert pieces(AllGather(x, scratch("z", rows, world, dtype="f32")), world) == gathered
