"""Buffers for an operation under test, and what every `launch()` and `cost()` must keep."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ultraflash.graphs.plan import Life, Op, Ref


def scratch(name: str, *shape: int, dtype: str = "bf16") -> Ref:
    return Ref(name, shape, dtype, Life.SCRATCH)


def weight(name: str, *shape: int, dtype: str = "bf16") -> Ref:
    return Ref(name, shape, dtype, Life.WEIGHT)


def state(name: str, *shape: int, dtype: str = "u8") -> Ref:
    return Ref(name, shape, dtype, Life.STATE)


def io(name: str, *shape: int, dtype: str = "i32") -> Ref:
    return Ref(name, shape, dtype, Life.IO)


def assert_launch(op: Op, stem: str, buffers: tuple[str, ...], **defines: Any) -> None:
    """`launch()` names source, buffers in field order, every constant and extent: plain data."""
    launch = op.launch("sm_90a")
    assert launch.stem == stem
    assert launch.buffers == buffers
    named = dict(launch.defines)
    assert len(named) == len(launch.defines), "a define is given twice"
    for name, value in defines.items():
        assert named[name] == value, f"{name} is {named[name]}, not {value}"
    for name, ref in op.refs:
        for axis, extent in enumerate(ref.shape):
            assert named[f"{name}_{axis}"] == extent
    for name, value in launch.defines:
        assert isinstance(value, int | float | str | bool | None), f"{name} is {type(value)}"
    assert hash(launch) == hash(op.launch("sm_90a"))
    constants = {f.name for f in fields(op)} - {name for name, _ in op.refs}
    assert constants <= named.keys()


def assert_cost(op: Op, nbytes: int, flops: int = 0) -> None:
    """The figures counted by hand."""
    cost = op.cost()
    assert (cost.nbytes, cost.flops) == (nbytes, flops)
