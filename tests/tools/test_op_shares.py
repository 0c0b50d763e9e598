"""Node times added up."""

from __future__ import annotations

import pytest

from helpers.golden_plans import tiny_model
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.step import Build
from ultraflash.tools.op_shares import by_op, share_lines


def test_the_most_expensive_operation_comes_first_and_nothing_is_lost() -> None:
    plan = build_decode(Build(tiny_model(), Capacity(1, 64)), 1, 1)
    times = [50.0 if node.op.stem() == "gate" else 1.0 for node in plan.nodes]
    shares = by_op(plan, times)
    assert shares[0].name == "gate"
    assert shares[0].us == 50.0 * shares[0].nodes
    assert sum(s.us for s in shares) == pytest.approx(sum(times))
    assert sum(s.nodes for s in shares) == len(plan.nodes)
    names = [s.name for s in shares]
    assert "linear wq_a" in names
    assert "linear" not in names
    lines = list(share_lines(shares))
    assert len(lines) == len(shares) + 1
    assert f"{len(plan.nodes)} nodes" in lines[-1]
