"""Several ranks on GPUs: on one each, or all on the first one, which exercises everything but
peer access.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.device import REHEARSAL
from helpers.devices import num_gpus
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.all_gather import AllGather
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.plan import Life, Node, Op, Plan, Ref
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.part import Part
from ultraflash.tools.diff_plan import Difference, difference

Array = npt.NDArray[Any]
APART, SHARED = "a GPU each", "one GPU"


def why_not(where: str, world: int) -> str:
    """Why ranks cannot stand there; "" where they can."""
    if REHEARSAL:
        return "the interpreter's ranks are tested in tests/runtime/test_worlds.py"
    if where == APART and num_gpus() < world:
        return f"needs {world} GPUs, this machine has {num_gpus()}"
    return ""


def ordinals(where: str, world: int) -> tuple[int, ...]:
    return tuple(range(world)) if where == APART else (0,) * world


def open_group(where: str, world: int, config: RuntimeConfig, model: Model, **options: bool) -> Any:
    """The checkpoint of `config` on a `GroupBackend`; ranks may share a GPU, which a server's may
    not."""
    from ultraflash.runtime.gpu.driver import Device
    from ultraflash.runtime.gpu.group import GroupBackend
    from ultraflash.runtime.gpu.uploader import Uploader
    from ultraflash.runtime.weights.device import upload_weights

    cache, index = prepare_cache_dir(config), CheckpointIndex.open(config.checkpoint)
    devices = [Device.open(ordinal) for ordinal in ordinals(where, world)]
    weights = []
    for rank, device in enumerate(devices):
        device.enter()
        with Uploader(device, cache) as uploader:
            part = Part(world, rank)
            weights.append(upload_weights(index, model, uploader.place, None, cache, part))
    return GroupBackend.join(devices, weights, cache, **options)


def open_bare(where: str, world: int) -> Any:
    """A `GroupBackend` without weights."""
    from ultraflash.runtime.gpu.driver import Device
    from ultraflash.runtime.gpu.group import GroupBackend

    devices = [Device.open(ordinal) for ordinal in ordinals(where, world)]
    nothing: Any = None
    cache = prepare_cache_dir(RuntimeConfig.from_env())
    return GroupBackend.join(devices, [nothing] * world, cache, keep_scratch=True)


def put(runner: Any, rank: int, name: str, value: Array) -> None:
    """A buffer of one rank alone."""
    one = slice(rank, rank + 1)
    runner._backend.each(lambda _: runner._runners[rank].write(name, value), one)


def forced(plan: Plan, ours: Any, theirs: Any) -> Iterator[tuple[int, Difference]]:
    """Node by node, every rank starting from what the interpreter's same rank has: what each rank
    of the device (`theirs`) wrote, compared with the interpreter's (`ours`).
    """
    for number, node in enumerate(plan.nodes):
        for rank in range(plan.world):
            for ref in node.op.reads():
                if ref.life is Life.STATE:
                    _put_state(theirs, rank, ref, ours.read(ref.name, rank))
                elif ref.life is not Life.WEIGHT:
                    put(theirs, rank, ref.name, ours.read(ref.name, rank))
        for ref in node.op.writes():
            if ref.life is Life.SCRATCH and ref not in node.op.reads():
                poison(theirs, ref)
        for runner in (ours, theirs):
            runner.run(slice(number, number + 1))
        for ref in node.op.writes():
            for rank in range(plan.world):
                got, want = (runner.read(ref.name, rank) for runner in (theirs, ours))
                yield rank, difference(number, node.label, ref, got, want)


def _put_state(runner: Any, rank: int, ref: Ref, value: Array) -> None:
    one = slice(rank, rank + 1)
    runner._backend.each(lambda _: runner._runners[rank].write_state(ref, value), one)


def poison(runner: Any, ref: Ref) -> None:
    """On every rank, so that gaps show."""
    runner._each(lambda own: own.poison(ref))


@dataclass(frozen=True)
class Exchanges:
    """A plan of exchanges alone, one behind the other."""

    plan: Plan

    @classmethod
    def of(cls, ops: Sequence[Op], world: int) -> Exchanges:
        nodes = tuple(Node(f"node{number}", op) for number, op in enumerate(ops))
        buffers = {ref.name: ref for op in ops for _, ref in op.refs}
        return cls(Plan("exchanges", 1, 1, world, nodes, buffers))

    def want(self, parts: dict[str, list[Array]]) -> dict[str, Array]:
        """What every rank must hold, from every rank's messages by name."""
        found = {}
        for node in self.plan.nodes:
            op: Any = node.op
            constants = [op.rounded] if isinstance(op, AllReduce) else []
            found[op.y.name] = type(op).reference(parts[op.x.name], *constants)
        return found


def reduce(number: int, *shape: int, rounded: bool = False) -> AllReduce:
    x, y = (Ref(f"{name}{number}", shape, "f32", Life.SCRATCH) for name in "xy")
    return AllReduce(x, Ref(y.name, shape, "bf16", Life.SCRATCH) if rounded else y, rounded)


def gather(number: int, world: int, rows: int, columns: int) -> AllGather:
    x = Ref(f"x{number}", (rows, columns), "f32", Life.SCRATCH)
    return AllGather(x, Ref(f"y{number}", (rows, world * columns), "f32", Life.SCRATCH))


SPECIAL = np.array(
    [0x80000000, 0, 1, 0x80000001, 0xFF800000, 0x00800000, 0x80800000], np.uint32
).view(np.float32)


def message(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Numbers of many sizes, some of them special: zeros of either sign, -infinity, subnormals."""
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape)
    values = values.astype(np.float32)
    special = rng.random(shape) < 0.01
    values[special] = rng.choice(SPECIAL, int(special.sum()))
    return values


def assert_same(got: Array, want: Array, where: str) -> None:
    """Bit for bit, but for the bits of what is no number."""
    assert got.shape == want.shape, where
    both = np.isnan(want)
    assert (np.isnan(got) == both).all(), where
    wrong = np.flatnonzero((got != want) & ~both)
    assert not len(wrong), f"{where}: {len(wrong)} of {want.size} differ, first {wrong[0]}"
    signs = np.signbit(got) != np.signbit(want)
    assert not (signs & ~both).any(), f"{where}: signs of zeros"
