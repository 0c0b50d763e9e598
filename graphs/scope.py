"""What all functions that append nodes share: a `Scope`, streams, angles, rings."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.io import Io
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.ops.quant8 import Quant8
from ultraflash.graphs.ops.ring_write import RingWrite
from ultraflash.graphs.ops.rms_norm import RmsNorm
from ultraflash.graphs.ops.rope_table import RopeTable
from ultraflash.graphs.plan import PlanBuilder, Ref


@dataclass(frozen=True)
class Angles:
    """cos and sin of one frequency table at this step's positions. [T, rope/2] f32 each."""

    cos: Ref
    sin: Ref


@dataclass(frozen=True)
class Scope:
    """What every layer function needs: where nodes go, sizes, io, switches of the whole plan."""

    b: PlanBuilder
    model: Model
    capacity: Capacity
    io: Io
    round_attention: bool  # test switch: bf16 attention weights as in the model authors' kernel
    rows: int  # of new buffers: the plan's, or one a sequence behind the last layer of a prefill

    def split(self, size: int) -> int:
        """One rank's part of a size that is split over ranks."""
        return size // self.b.world

    def out(self, label: str, shape: tuple[int, ...], dtype: str = "bf16") -> Ref:
        """A scratch buffer of this step, [T, *shape]."""
        return self.b.scratch(label, (self.rows, *shape), dtype)

    def linear(
        self, label: str, x: Ref, weight: str, size: int, form: str, dtype: str = "bf16",
        *, beside: bool = False,
    ) -> Ref:  # fmt: skip
        """y = x @ weight.T, [T, size]."""
        y = self.out(label, (size,), dtype)
        w = self.b.weight(weight, (size, x.shape[-1]), form)
        self.b.add(label, Linear(x, w, y, rounded=dtype == "bf16"), beside=beside)
        return y

    def norm(self, label: str, x: Ref, weight: str, *, q8: bool = False) -> Ref:
        """RMS norm over the last axis, or its Q8 copy alone."""
        y, w = self.out(label, x.shape[1:]), self.b.weight(weight, x.shape[-1:], "bf16")
        self.b.add(label, RmsNorm(x, w, y, self.model.norm_eps, q8))
        return y

    def quant8(self, label: str, x: Ref) -> Ref:
        """The Q8 copy that FP8 and FP4 linears read."""
        y = self.out(label, x.shape[1:])
        self.b.add(label, Quant8(x, y))
        return y

    def part_name(self, name: str) -> str:
        """What a sub-layer's last product is called: `name` unless ranks still have to add."""
        return name if self.b.world == 1 else f"{name}_part"

    def reduce(self, name: str, part: Ref) -> Ref:
        """The sum of all ranks' parts as bf16, called `name`; with one rank the part is that
        already.
        """
        if self.b.world == 1:
            return part
        y = self.out(name, part.shape[1:])
        self.b.add(name, AllReduce(part, y, rounded=True))
        return y

    @property
    def partial(self) -> str:
        """Type of a result that ranks still have to add."""
        return "bf16" if self.b.world == 1 else "f32"


@dataclass(frozen=True)
class Streams:
    """What passes from layer to layer: residual copies and the weights of the next collapse."""

    x: Ref  # [T, C, D] bf16
    pre: Ref  # [T, C] f32


def angles(s: Scope, label: str, table: str, offset: int = 0, *, beside: bool = False) -> Angles:
    """Angles of this step's positions (plus offset) under the frequency table `plain` or
    `compressed`.
    """
    half = s.model.rope_dim // 2
    cos, sin = s.out(f"{label}.cos", (half,), "f32"), s.out(f"{label}.sin", (half,), "f32")
    freq = s.b.weight(f"rope.{table}", (half,), "f32")
    s.b.add(label, RopeTable(s.io.position, freq, cos, sin, offset), beside=beside)
    return Angles(cos, sin)


def ring(s: Scope, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
    """A position-addressed ring, [slots, R, *shape]."""
    return s.b.state(name, (s.capacity.slots, s.capacity.ring(s.model), *shape), dtype)


def write_ring(s: Scope, label: str, value: Ref, ring: Ref) -> None:
    """This step's rows enter a ring, after everybody has read it."""
    s.b.add(label, RingWrite(value, ring, s.io.slot, s.io.position, s.io.row_start))


def write_rings(
    s: Scope, label: str, values: tuple[Ref, Ref], rings: tuple[Ref, Ref], *, beside: bool = False
) -> None:
    """The same for what has two parts."""
    (value, second), (into, second_into), io = values, rings, s.io
    op = RingWrite(value, into, io.slot, io.position, io.row_start, second, second_into)
    s.b.add(label, op, beside=beside)
