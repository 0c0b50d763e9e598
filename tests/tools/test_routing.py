"""Which experts rows ask for, and how many bytes that is."""

from __future__ import annotations

import numpy as np
import pytest

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.weights.synthetic import KINDRED
from ultraflash.tools.routing import Distinct, bytes_to_read, expected_distinct, tokens

MODEL = release_model()


def decode(rows: int, world: int, block: int = 0, context: int = 1024) -> Plan:
    return build_decode(Build(MODEL, Capacity(2, context), world, block), rows, 1)


def chosen(plan: Plan, backbone: float, draft: float = 0.0) -> Distinct:
    ids = [node.op.ids.name for node in plan.nodes if isinstance(node.op, Gate)]
    return Distinct({n: backbone if n.startswith("L") else draft for n in ids}, backbone)


def test_rows_that_choose_alone() -> None:
    assert expected_distinct(384, 6, 1) == pytest.approx(6)
    assert expected_distinct(384, 6, 7) == pytest.approx(40.08, abs=0.01)


def test_tokens_of_each_routing() -> None:
    rng = np.random.default_rng(0)
    assert len(set(tokens(MODEL, "equal", 8, rng))) == 1
    assert set(tokens(MODEL, "overlap17", 8, rng)) <= set(KINDRED)
    assert len(set(tokens(MODEL, "overlap17", 8, rng))) == 8
    assert len(set(tokens(MODEL, "random", 8, rng))) == 8


@pytest.mark.parametrize(
    ("rows", "world", "gigabytes"), [(1, 1, 13.03), (7, 1, 38.67), (7, 4, 10.48), (7, 8, 5.78)]
)
def test_a_step_reads_what_the_specification_counts(
    rows: int, world: int, gigabytes: float
) -> None:
    """model.md section 9 and performance.md section 3.3: weights alone; here with state."""
    plan = decode(rows, world)
    needed = bytes_to_read(plan, chosen(plan, expected_distinct(384, 6, rows)))
    assert needed / 1e9 == pytest.approx(gigabytes, rel=0.012)


def test_drafting_reads_what_the_specification_counts() -> None:
    whole, plain = decode(7, 1, block=5), decode(7, 1)
    backbone = expected_distinct(384, 6, 7)
    drafted = bytes_to_read(whole, chosen(whole, backbone, 14.3))
    assert (drafted - bytes_to_read(plain, chosen(plain, backbone))) / 1e9 == pytest.approx(
        3.04, rel=0.02
    )


def test_fewer_experts_are_fewer_bytes_and_longer_contexts_more() -> None:
    plan = decode(7, 8)
    equal = bytes_to_read(plan, chosen(plan, 6))
    assert equal < bytes_to_read(plan, chosen(plan, 40))
    longer = decode(7, 8, context=1 << 20)
    added = bytes_to_read(longer, chosen(longer, 6)) - equal
    scan, pools = 170 * ((1 << 20) - 1024), 4 * 68 * (7 * 16_384 - 1024)
    assert added == pytest.approx(scan + pools, rel=0.01)
