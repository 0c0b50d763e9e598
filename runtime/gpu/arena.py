"""Scratch memory of a plan: buffers share one slab, each where its lifetime allows.

A buffer lives from the node that writes it to the last one that reads it, and longer by the nodes
that run beside either. Placement is first fit by order of first use; `report` says what lies where.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.plan import Life, Plan

ALIGNMENT = 256


@dataclass(frozen=True)
class Place:
    """Where a scratch buffer lies, and the nodes between which it must not be overwritten; a node
    and those beside it count as one.
    """

    name: str
    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """The layout of a plan's scratch."""

    places: tuple[Place, ...]
    size: int

    @classmethod
    def of(cls, plan: Plan, *, keep_all: bool = False) -> Arena:
        """Lay a plan's scratch out; with `keep_all` nothing is shared, so that all can be read."""
        spans: dict[str, list[int]] = {}
        number = -1  # nodes that run side by side have one
        for node in plan.nodes:
            number += not node.beside
            for _, ref in node.op.refs:
                if ref.life is Life.SCRATCH:
                    spans.setdefault(ref.name, [number, number])[1] = number
        placed: list[Place] = []
        top = 0
        for name, (first, last) in spans.items():
            size = -(-max(plan.buffers[name].nbytes, 1) // ALIGNMENT) * ALIGNMENT
            busy = (
                placed if keep_all else [p for p in placed if p.last >= first and p.first <= last]
            )
            offset = _first_fit(busy, size)
            placed.append(Place(name, offset, size, first, last))
            top = max(top, offset + size)
        return cls(tuple(placed), top)

    def report(self) -> str:
        """Totals and the largest buffers."""
        whole = sum(p.size for p in self.places)
        lines = [f"scratch {self.size:,} bytes for {len(self.places)} buffers of {whole:,} bytes"]
        for p in sorted(self.places, key=lambda p: -p.size)[:8]:
            lines.append(f"  {p.size:>12,} at {p.offset:>12,}  nodes {p.first}-{p.last}  {p.name}")
        return "\n".join(lines)


def _first_fit(busy: list[Place], size: int) -> int:
    offset = 0
    for place in sorted(busy, key=lambda p: p.offset):
        if offset + size <= place.offset:
            break
        offset = max(offset, place.offset + place.size)
    return offset
