"""What one operation is asked to do in a plan: its distinct shapes, and how often each occurs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.ops.engram_gather import EngramGather
from ultraflash.graphs.plan import Life, Op, Plan, Ref

MAX_TABLE_BYTES = 8 << 30  # of an Engram table that is gathered from; the release's have 101 GB


@dataclass(frozen=True)
class Case:
    """An operation at the shapes of `count` nodes of a plan; `label` is the first one's."""

    label: str
    op: Op
    count: int

    @property
    def shapes(self) -> str:
        """The first weight or state, else the first buffer: what decides the time."""
        refs = list(self.op.refs)
        large = [(name, ref) for name, ref in refs if ref.life in (Life.WEIGHT, Life.STATE)]
        name, ref = (large or refs)[0]
        return f"{name}[{','.join(map(str, ref.shape))}]:{ref.dtype}"


def cases(plan: Plan, stem: str) -> list[Case]:
    """The cases of an operation ("all": of every one), in the plan's order.

    Raises:
        GraphError: when the plan has no such operation, naming those that it has.
    """
    found: dict[object, Case] = {}
    for node in plan.nodes:
        if node.op.COLLECTIVE or stem not in (node.op.stem(), "all"):
            continue
        key = _shape_of(node.op)
        known = found.get(key)
        count = known.count + 1 if known else 1
        found[key] = replace(known, count=count) if known else Case(node.label, node.op, 1)
    if not found:
        stems = sorted({node.op.stem() for node in plan.nodes if not node.op.COLLECTIVE})
        raise GraphError(
            f"plan {plan.name} of {plan.rows} rows has no operation {stem!r}: "
            f"it has {', '.join(stems)}"
        )
    return [replace(case, op=_fitted(case.op)) for case in found.values()]


def _shape_of(op: Op) -> object:
    """Equal for nodes that take the same time: names and the number in a block do not matter."""
    refs = tuple((name, ref.shape, ref.dtype, ref.life) for name, ref in op.refs)
    constants = tuple((name, value) for name, value in op.constants if name != "index")
    return type(op), refs, constants


def _fitted(op: Op) -> Op:
    """Gathers touch random rows of their table: fewer of them take the same time."""
    if not isinstance(op, EngramGather) or op.table.nbytes <= MAX_TABLE_BYTES:
        return op
    rows, dim = op.table.shape
    table = Ref(
        op.table.name, (rows * MAX_TABLE_BYTES // op.table.nbytes, dim), "rows8", op.table.life
    )
    return replace(op, table=table)
