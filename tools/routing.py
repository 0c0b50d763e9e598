"""Which experts a step of random rows asks for, and what it therefore has to read.

With synthetic weights a row's stream stays its token's embedding (runtime/weights/synthetic.py), so
that tokens alone decide. `random`: independent tokens. `overlap17`: tokens whose embeddings share a
direction, of which seven repeat 17 % of their experts. `equal`: one token in all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.experts_down import ExpertsDown
from ultraflash.graphs.ops.experts_up import ExpertsUp
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.index_scores import IndexScores
from ultraflash.graphs.ops.select_topk import SelectTopk
from ultraflash.graphs.plan import Life, Op, Plan
from ultraflash.runtime.backend import Runner
from ultraflash.runtime.step_io import Draw, Part, write_step
from ultraflash.runtime.weights.synthetic import KINDRED

ROUTINGS = ("random", "overlap17", "equal")
_FIRST = 3  # ids below are special


def tokens(model: Model, routing: str, rows: int, rng: np.random.Generator) -> list[int]:
    """Token ids of a step's rows."""
    if routing == "equal":
        return [int(rng.integers(_FIRST, model.vocab))] * rows
    if routing == "overlap17":
        return [int(i) for i in rng.choice(np.array(KINDRED), rows, replace=rows > len(KINDRED))]
    return [int(i) for i in rng.integers(_FIRST, model.vocab, rows)]


def expected_distinct(experts: int, active: int, rows: int) -> float:
    """Of rows that choose independently: experts x (1 - (1 - active/experts)^rows)."""
    return float(experts * (1 - (1 - active / experts) ** rows))


@dataclass(frozen=True)
class Distinct:
    """Mean number of different experts a layer, over some steps; by name of the chosen ids."""

    by_ids: dict[str, float]
    expected: float  # in a layer of the backbone, were the choices independent

    @property
    def backbone(self) -> float:
        """Over the layers of the backbone."""
        return float(np.mean([n for name, n in self.by_ids.items() if name.startswith("L")]))


def measured_distinct(
    runner: Runner, model: Model, slot: int, start: int, steps: Sequence[Sequence[int]]
) -> Distinct:
    """Run steps up to each gate in turn and look at what it chose."""
    plan = runner.plan
    gates = [i for i, node in enumerate(plan.nodes) if isinstance(node.op, Gate)]
    seen: dict[str, list[int]] = {}
    for number, ids in enumerate(steps):
        write_step(runner, [Part(slot, start, ids, Draw(step=number))])
        begin = 0
        for at in gates:
            runner.run(slice(begin, at + 1))
            begin = at + 1
            op = plan.nodes[at].op
            assert isinstance(op, Gate)
            seen.setdefault(op.ids.name, []).append(len(np.unique(runner.read(op.ids.name))))
    rows = len(steps[0])
    expected = expected_distinct(model.experts, model.active_experts, rows)
    return Distinct({name: float(np.mean(counts)) for name, counts in seen.items()}, expected)


def bytes_to_read(plan: Plan, distinct: Distinct) -> int:
    """Weights and state that a step cannot do without, once an operation: experts that were chosen,
    rows that are looked up, entries that are attended to; of index keys behind the candidate source
    only each row's pool. Activations stay in the L2 cache.
    """
    pools = {
        node.label.partition(".")[0]: node.op.pool.shape[1] * node.op.block_size
        for node in plan.nodes
        if isinstance(node.op, SelectTopk) and node.op.pool
    }
    return sum(
        _read(node.op, distinct, pools.get(node.label.partition(".")[0])) for node in plan.nodes
    )


def _read(op: Op, distinct: Distinct, pool: int | None) -> int:
    if isinstance(op, ExpertsUp | ExpertsDown):
        weights = (op.w1, op.w3) if isinstance(op, ExpertsUp) else (op.w2,)
        one = sum(w.nbytes for w in weights) / weights[0].shape[0]
        return round(one * distinct.by_ids[op.ids.name])
    if isinstance(op, IndexScores) and pool:
        _, entries, width = op.codes.shape
        return min(entries, op.q.shape[0] * pool) * (width + op.scales.shape[2])
    passing = sum(ref.nbytes for _, ref in op.refs if ref.life in (Life.IO, Life.SCRATCH))
    return max(op.cost().nbytes - passing, 0)
