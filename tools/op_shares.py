"""Where a step's time goes: node times added up by operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ultraflash.graphs.plan import Plan


@dataclass(frozen=True)
class Share:
    """All nodes of one operation; of `linear` those of one weight's role."""

    name: str
    nodes: int
    us: float


def by_op(plan: Plan, node_us: Sequence[float]) -> list[Share]:
    """The most expensive first."""
    found: dict[str, list[float]] = {}
    for node, us in zip(plan.nodes, node_us, strict=True):
        stem = node.op.stem()
        found.setdefault(f"linear {_role(node.label)}" if stem == "linear" else stem, []).append(us)
    shares = [Share(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(shares, key=lambda share: -share.us)


def share_lines(shares: Sequence[Share]) -> Iterator[str]:
    """A table in plain text."""
    whole = sum(share.us for share in shares)
    for share in shares:
        yield (
            f"  {share.name:32} {share.nodes:5} nodes {share.us / 1e3:9.3f} ms "
            f"{100 * share.us / whole:5.1f} %  {share.us / share.nodes:9.2f} us a node"
        )
    yield (
        f"  {'together':32} {sum(s.nodes for s in shares):5} nodes {whole / 1e3:9.3f} ms, events "
        f"between all nodes of one graph: more than a step, which overlaps them"
    )


def _role(label: str) -> str:
    """`wq_a` of `L3.attn.wq_a`, of draft stages too."""
    return label.rpartition(".")[2]
