"""One operation's shapes in a plan: each once, counted; tables that no GPU holds are cut."""

from __future__ import annotations

from collections import Counter

import pytest

from helpers.compiler import device_nodes
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.gpu.nvrtc import Unit
from ultraflash.tools.op_cases import MAX_TABLE_BYTES, cases


def plan(world: int = 1, rows: int = 8) -> Plan:
    return build_decode(Build(release_model(), Capacity(1, 4096), world, block=5), rows, 1)


@pytest.mark.parametrize("world", [1, 8])
def test_every_node_is_counted_once(world: int) -> None:
    whole = plan(world)
    found = Counter[str]()
    for case in cases(whole, "all"):
        found[case.op.stem()] += case.count
    alone = (node for node in device_nodes([whole]) if not node.op.COLLECTIVE)
    assert found == Counter(node.op.stem() for node in alone)


def test_a_case_for_each_shape() -> None:
    found = {case.label: case for case in cases(plan(), "experts_up")}
    assert {label: case.count for label, case in found.items()} == {
        "L0.ffn.up": 40,
        "draft.stage0.ffn.up": 3,
    }
    assert found["L0.ffn.up"].shapes == "w1[384,2304,5120]:fp4"
    split = {case.label: case for case in cases(plan(8), "experts_up")}
    assert split["L0.ffn.up"].shapes == "w1[384,288,5120]:fp4"


def test_numbers_within_a_block_make_no_shapes_of_their_own() -> None:
    (sample,) = cases(plan(), "draft_sample")
    assert sample.count == 5


def test_tables_are_cut_and_nothing_else_is() -> None:
    for case in cases(plan(), "engram_gather"):
        assert case.op.stem() == "engram_gather"
        table = dict(case.op.refs)["table"]
        assert MAX_TABLE_BYTES * 0.99 < table.nbytes <= MAX_TABLE_BYTES
        assert table.shape[1] == 256
    whole = {node.op for node in plan().nodes}
    assert all(c.op in whole for c in cases(plan(), "all") if c.op.stem() != "engram_gather")


def test_cut_tables_take_the_same_kernel() -> None:
    units = {Unit.of(node.op) for node in plan().nodes}
    assert {Unit.of(case.op) for case in cases(plan(), "all")} == units


def test_an_operation_that_is_not_there() -> None:
    with pytest.raises(GraphError, match="of 1 rows has no operation 'lineal': it has accept, "):
        cases(plan(rows=1), "lineal")
