"""What `Op` promises for every operation, checked on the classes themselves."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

from helpers.ops import scratch, state
from ultraflash.graphs import ops
from ultraflash.graphs.plan import Launch, Op

MODULES = [
    importlib.import_module(f"{ops.__name__}.{found.name}")
    for found in pkgutil.iter_modules(ops.__path__)
]
CLASSES = sorted(
    {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Op) and value is not Op
    },
    key=lambda c: c.__name__,
)
every_op = pytest.mark.parametrize("op", CLASSES, ids=[c.__name__ for c in CLASSES])


def test_every_module_holds_an_op() -> None:
    assert {c.__module__ for c in CLASSES} == {m.__name__ for m in MODULES}


@every_op
def test_its_stem_is_its_file(op: type[Op]) -> None:
    assert op.__module__ == f"{ops.__name__}.{op.stem()}"


@every_op
def test_it_is_plain_frozen_data_with_a_docstring(op: type[Op]) -> None:
    assert dataclasses.is_dataclass(op)
    assert op.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert op.__doc__
    assert "Shapes:" in op.__doc__


@every_op
def test_reference_takes_the_inputs_in_field_order(op: type[Op]) -> None:
    """The interpreter binds by position: a parameter out of place would be another buffer."""
    inputs = [f.name for f in dataclasses.fields(op) if f.name not in op.OUT]
    assert isinstance(inspect.getattr_static(op, "reference"), staticmethod)
    assert list(inspect.signature(op.reference).parameters) == inputs  # type: ignore[attr-defined]


@every_op
def test_outputs_and_updates_are_fields(op: type[Op]) -> None:
    names = {f.name for f in dataclasses.fields(op)}
    assert set(op.OUT) <= names
    assert set(op.UPDATES) <= names - set(op.OUT)
    assert op.OUT or op.UPDATES


@dataclasses.dataclass(frozen=True)
class Toy(Op):
    """Reads a and, if it is there, b; updates s; fills y."""

    UPDATES = ("s",)
    a: object
    b: object
    s: object
    y: object
    factor: float = 2.0


A, B, S, Y = scratch("A", 2, 3), scratch("B", 2), state("S", 4, 5), scratch("Y", 2, 3)


def test_reads_and_writes() -> None:
    assert Toy(A, B, S, Y).reads() == [A, B, S]
    assert Toy(A, B, S, Y).writes() == [S, Y]
    assert Toy(A, None, S, Y).reads() == [A, S]


def test_launch_of_an_op_without_its_optional_buffer() -> None:
    launch = Toy(A, None, S, Y, 3.0).launch("sm_90a")
    assert launch == Launch(
        "test_op",
        ("A", "S", "Y"),
        (
            *(("b", None), ("factor", 3.0), ("a_0", 2), ("a_1", 3)),
            *(("s_0", 4), ("s_1", 5), ("y_0", 2), ("y_1", 3)),
        ),
        grid=(2, 1, 1),
        block=(256, 1, 1),
        shared=0,
    )


def test_cost_leaves_state_to_the_op() -> None:
    """Of 20 bytes of state a step may touch any part: an op says which."""
    cost = Toy(A, B, S, Y).cost()
    assert (cost.nbytes, cost.flops) == (2 * (6 + 2 + 6), 0)
