"""A step as data: named buffers and an ordered list of operations.

Backends interpret a `Plan`; nothing here computes. A plan names every buffer it touches, so
dependencies, lifetimes, memory and traffic can be derived from it. Nodes are identical on every
rank; only shapes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import prod
from typing import Any, ClassVar

from blake3 import blake3

from ultraflash.graphs.errors import PlanError

# Bytes of one element; the quantised weight formats add their scales in `Ref.nbytes`.
_ELEMENT_BYTES = {
    "f32": 4.0,
    "bf16": 2.0,
    "i32": 4.0,
    "u32": 4.0,
    "i64": 8.0,
    "u64": 8.0,
    "u8": 1.0,
    "fp8": 1.0,
    "fp4": 0.5,
    "rows8": 1.0,
}


class Life(StrEnum):
    """How long the contents of a buffer matter."""

    WEIGHT = "weight"  # loaded once, never written
    STATE = "state"  # position-addressed, survives steps, [slots, ...]
    IO = "io"  # written by the host before a step, or read by it afterwards
    SCRATCH = "scratch"  # lives inside one step


@dataclass(frozen=True, slots=True)
class Ref:
    """A named buffer of one rank. `dtype` is a plain type or a weight format (fp8, fp4, rows8) of
    logical `shape`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    life: Life

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        size = prod(self.shape) * _ELEMENT_BYTES[self.dtype]
        *lead, rows, columns = (1, 1, *self.shape)
        if self.dtype == "fp8":
            size += prod(lead) * -(-rows // 32) * -(-columns // 32)
        elif self.dtype in ("fp4", "rows8"):
            size += prod(lead) * rows * -(-columns // 32)
        return int(size)

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.shape))}]:{self.dtype}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a node must move and compute at least: device memory bytes and multiply-add operations
    times two.
    """

    nbytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.nbytes + other.nbytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a device needs to run a node: which source, with which buffers in which order, and
    constants as defines.
    """

    stem: str
    buffers: tuple[str, ...]
    defines: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # bytes of dynamic shared memory


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel is spread out: CTAs along x and y, threads, bytes of dynamic shared memory.

    It follows from shapes alone, never from data: a captured graph is never updated.
    """

    x: int
    y: int = 1
    threads: int = 256
    shared: int = 0


@dataclass(frozen=True)
class Op:
    """Base of all operations. Fields hold buffers (`Ref`, or None where optional) and constants.

    `reference` takes every field that is not in `OUT`, in field order, and returns the arrays of
    the `OUT` fields that are not None (one array, or a tuple). Arrays of `UPDATES` fields are
    changed in place.
    """

    OUT: ClassVar[tuple[str, ...]] = ("y",)
    UPDATES: ClassVar[tuple[str, ...]] = ()
    COLLECTIVE: ClassVar[bool] = (
        False  # its reference gets, for each input, the list of all ranks' arrays
    )

    @classmethod
    def stem(cls) -> str:
        """The one name of this operation's kernel, reference, test and speed row."""
        return cls.__module__.rpartition(".")[2]

    @property
    def refs(self) -> Iterator[tuple[str, Ref]]:
        """(field, buffer) in field order, absent optional buffers left out."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Ref):
                yield f.name, value

    @property
    def constants(self) -> tuple[tuple[str, Any], ...]:
        """(field, value) of everything that is not a buffer."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return tuple((name, value) for name, value in values if not isinstance(value, Ref))

    def reads(self) -> list[Ref]:
        """Buffers whose contents this node needs."""
        return [ref for name, ref in self.refs if name not in self.OUT]

    def writes(self) -> list[Ref]:
        """Buffers that this node fills or changes."""
        return [ref for name, ref in self.refs if name in self.OUT or name in self.UPDATES]

    def launch(self, arch: str) -> Launch:
        """Describe the launch for `arch` ("sm_90a", ...): plain data, no device needed."""
        del arch  # arch-free until an op has a variant for one architecture
        dims = tuple(
            (f"{name}_{axis}", size)
            for name, ref in self.refs
            for axis, size in enumerate(ref.shape)
        )
        g = self.geometry()
        return Launch(
            self.stem(),
            tuple(ref.name for _, ref in self.refs),
            self.constants + dims,
            (g.x, g.y, 1),
            (g.threads, 1, 1),
            g.shared,
        )

    def geometry(self) -> Geometry:
        """A CTA for each row of the first buffer, unless an operation says otherwise."""
        first = next(ref for _, ref in self.refs)
        return Geometry(first.shape[0])

    def variant(self) -> dict[str, int]:
        """What the kernel's text is compiled for beside its buffers' types; it sees `UF_{name}`.

        For sizes of registers and shared memory, and for clusters. Values follow from shapes and
        constants alone; each combination is a kernel of its own, so there should be few.
        """
        return {}

    def flops(self) -> int:
        """Multiply-adds times two; 0 for operations that only move data."""
        return 0

    def cost(self) -> Cost:
        """Every buffer once, except state, of which ops that touch a part give their own figure."""
        touched = sum(ref.nbytes for _, ref in self.refs if ref.life is not Life.STATE)
        return Cost(touched + self.state_bytes(), self.flops())

    def state_bytes(self) -> int:
        """Bytes of persistent state that this node reads or writes."""
        return 0


@dataclass(frozen=True, slots=True)
class Node:
    """An operation at its place. `label` says where in the model.

    `beside`: it may run at the same time as the node in front of it, and as all of those back to
    the first that stands beside none.
    """

    label: str
    op: Op
    beside: bool = False


@dataclass(frozen=True)
class Plan:
    """An ordered, checked list of nodes over named buffers."""

    name: str
    rows: int
    sequences: int
    world: int
    nodes: tuple[Node, ...]
    buffers: dict[str, Ref] = field(repr=False)

    def span(self, prefix: str) -> slice:
        """The contiguous nodes whose label is `prefix` or starts with `prefix.`.

        Raises:
            PlanError: when there are none, or others stand between them.
        """
        found = [
            i
            for i, n in enumerate(self.nodes)
            if n.label == prefix or n.label.startswith(prefix + ".")
        ]
        if not found or found != list(range(found[0], found[-1] + 1)):
            raise PlanError(f"plan {self.name} has no contiguous nodes labelled {prefix!r}")
        return slice(found[0], found[-1] + 1)

    def of_life(self, life: Life) -> list[Ref]:
        """All buffers of one lifetime, in order of first use."""
        return [ref for ref in self.buffers.values() if ref.life is life]

    def cost(self) -> Cost:
        """Sum over the nodes."""
        return sum((n.op.cost() for n in self.nodes), Cost(0, 0))

    def text(self) -> str:
        """A stable, readable listing: one line a node, outputs left, inputs right."""
        lines = [f"plan {self.name} rows={self.rows} sequences={self.sequences} world={self.world}"]
        for number, node in enumerate(self.nodes):
            out = ", ".join(str(r) for r in node.op.writes())
            inputs = ", ".join(r.name for r in node.op.reads() if r not in node.op.writes())
            constants = " ".join(f"{k}={v}" for k, v in node.op.constants if v is not None)
            beside = " beside" if node.beside else ""
            call = f"{type(node.op).__name__}({inputs})"
            line = f"{number:4d} {node.label:28s} {out} = {call} {constants}{beside}"
            lines.append(line.rstrip())
        return "\n".join(lines) + "\n"

    def digest(self) -> str:
        """Hash of `text()` and all buffers: equal digests mean the same step on the same memory."""
        listing = "\n".join(f"{ref} {ref.life}" for ref in self.buffers.values())
        return blake3((self.text() + listing).encode()).hexdigest()


class PlanBuilder:
    """Collects nodes and checks each against the buffers known so far."""

    def __init__(self, name: str, rows: int, sequences: int, world: int = 1) -> None:
        """Start an empty plan for `rows` rows of `sequences` sequences on each of `world` ranks."""
        self.name, self.rows, self.sequences, self.world = name, rows, sequences, world
        self._nodes: list[Node] = []
        self._buffers: dict[str, Ref] = {}
        self._written: set[str] = set()

    def scratch(self, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
        """A buffer of this step."""
        return Ref(name, shape, dtype, Life.SCRATCH)

    def weight(self, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
        """A weight, by its name in the weight table; `shape` is one rank's."""
        return Ref(name, shape, dtype, Life.WEIGHT)

    def state(self, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
        """Persistent memory; the first axis is the slot."""
        return Ref(name, shape, dtype, Life.STATE)

    def io(self, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
        """A buffer that the host reads or writes between steps."""
        return Ref(name, shape, dtype, Life.IO)

    def add(self, label: str, op: Op, *, beside: bool = False) -> None:
        """Append a node; `beside` as in `Node`.

        Raises:
            PlanError: it reads scratch that no earlier node wrote, writes scratch twice, writes a
            weight, or uses a
                buffer under two shapes, dtypes or lifetimes; or it stands beside a node that
                writes what it touches, or reads what it writes.
        """
        for ref in op.reads():
            self._know(label, ref)
            if ref.life is Life.SCRATCH and ref.name not in self._written:
                raise PlanError(f"{label} reads {ref} before any node wrote it")
        for ref in op.writes():
            self._know(label, ref)
            if ref.life is Life.WEIGHT:
                raise PlanError(f"{label} writes the weight {ref}")
            if ref.life is Life.SCRATCH and ref.name in self._written:
                raise PlanError(f"{label} writes {ref}, which an earlier node wrote already")
            self._written.add(ref.name)
        node = Node(label, op, beside)
        if beside:
            self._check_beside(node)
        self._nodes.append(node)

    def build(self) -> Plan:
        """The finished plan.

        Raises:
            PlanError: when it is empty.
        """
        if not self._nodes:
            raise PlanError(f"plan {self.name} has no nodes")
        return Plan(
            self.name,
            self.rows,
            self.sequences,
            self.world,
            tuple(self._nodes),
            dict(self._buffers),
        )

    def _check_beside(self, node: Node) -> None:
        if not self._nodes:
            raise PlanError(f"{node.label} stands first, beside no other node")
        reads, writes = ({ref.name for ref in some()} for some in (node.op.reads, node.op.writes))
        for other in reversed(self._nodes):
            written = {ref.name for ref in other.op.writes()}
            read = {ref.name for ref in other.op.reads()}
            if clash := (written & (reads | writes)) | (read & writes):
                raise PlanError(
                    f"{node.label} cannot run beside {other.label}: both touch {min(clash)}"
                )
            if not other.beside:
                break

    def _know(self, label: str, ref: Ref) -> None:
        known = self._buffers.setdefault(ref.name, ref)
        if known != ref:
            raise PlanError(f"{label} uses {ref} ({ref.life}), known as {known} ({known.life})")
