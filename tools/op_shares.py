"""Where a step's time goes: node times added up by operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ultraflash.graphs.plan import Plan

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.driver import Stream
    from ultraflash.runtime.gpu.runner import CudaRunner


@dataclass(frozen=True)
class Share:
    """All nodes of one operation; of `linear` those of one weight's role."""

    name: str
    nodes: int
    us: float


def node_us(runner: CudaRunner, stream: Stream, replays: int) -> list[float]:
    """Microseconds of each node: medians over replays of a graph with events between nodes.

    What two events with nothing between them take is taken off. Kernels that would begin before
    their predecessor's end cannot: the sum is more than a step.
    """
    from ultraflash.runtime.gpu.driver import Event, Graph

    marks = [Event() for _ in range(len(runner.plan.nodes) + 2)]
    graph = Graph(stream)
    runner.copy_in()
    for number in range(len(runner.plan.nodes)):
        marks[number].record_in_graph(stream)
        runner.queue(number)
    for mark in marks[-2:]:
        mark.record_in_graph(stream)
    runner.copy_out()
    graph.finish()
    seen = []
    for _ in range(replays + 1):
        graph.launch()
        stream.wait()
        seen.append([1e3 * after.since(before) for before, after in pairwise(marks)])
    graph.close()
    *times, empty = np.median(np.array(seen[1:]), axis=0)
    return [max(float(time - empty), 0.0) for time in times]


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
