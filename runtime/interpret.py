"""The NumPy backend: walks a plan's nodes and calls each operation's `reference`, for all ranks in
one process.

It knows no operation. bf16 buffers are float32 arrays, quantised weights exact float64 matrices
(see weights/load.py).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ultraflash.graphs.io import RESULTS
from ultraflash.graphs.plan import Life, Node, Plan, Ref
from ultraflash.runtime.backend import Array, Bytes, Rows, Staged, check_size
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.weights.load import Weights

_DTYPES = {
    "bf16": np.float32,
    "f32": np.float32,
    "i32": np.int32,
    "u32": np.uint32,
    "i64": np.int64,
    "u64": np.uint64,
    "u8": np.uint8,
}


@dataclass(frozen=True, slots=True)
class _Call:
    """A node bound to one runner: fixed arguments in place, the others by buffer name."""

    node: Node
    reference: Callable[..., Any]
    fixed: list[list[Any]]  # one argument list a rank
    named: list[tuple[int, str]]  # (argument index, buffer that is looked up at run time)
    out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Brought:
    """Implements `Staged`: copied when it was asked for."""

    data: bytes

    def wait(self, seconds: float | None = None) -> bool:
        return True

    def take(self) -> bytes:
        return self.data


class NumpyBackend:
    """Implements `Backend` on the CPU. State is [slots, ...] for every rank; all ranks hold all
    global KV.
    """

    def __init__(self, weights: Weights, world: int = 1, check: bool = False) -> None:
        """Keep the weights; with `check` every node's results are examined (shape, type, NaN, bf16
        bits).
        """
        self.weights, self.world, self.check = weights, world, check
        self._state: list[dict[str, Array]] = [{} for _ in range(world)]

    arch = "cpu"
    places = 1  # a launch is done when it returns

    def facts(self) -> dict[str, Any]:
        """NumPy, its BLAS, and the instructions that these find decide the order of sums.

        OpenBLAS chooses its kernels by processor, so the same wheel on two machines may differ.
        """
        built: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[assignment]
        blas = built.get("Build Dependencies", {}).get("blas", {})
        return {
            "machine": platform.machine(),
            "numpy": np.__version__,
            "blas": [blas.get("name"), blas.get("version")],
            "simd": built.get("SIMD Extensions"),
        }

    def compile(self, plan: Plan) -> NumpyRunner:
        """Bind a plan's nodes to weights and state.

        Raises:
            DeviceError: when the plan is for another world, or a buffer does not fit what is there.
        """
        if plan.world != self.world:
            raise DeviceError(
                f"plan {plan.name} is for world {plan.world}, this backend has {self.world} ranks"
            )
        return NumpyRunner(self, plan)

    def clear_slot(self, slot: int) -> None:
        """Zero every state buffer of a slot."""
        for buffers in self._state:
            for array in buffers.values():
                array[slot] = 0

    def read_state(self, name: str, slot: int, start: int, end: int) -> Array:
        """A copy of rows of a slot, from rank 0.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        return self._named(name, 0)[slot, start:end].copy()

    def write_state(self, name: str, slot: int, start: int, rows: Array) -> None:
        """Rows into a slot, on every rank.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        for rank in range(self.world):
            self._named(name, rank)[slot, start : start + len(rows)] = rows

    def stage(self, slot: int, parts: Sequence[tuple[bytes, Sequence[Rows]]]) -> list[Staged]:
        """Copy rows at once.

        Raises:
            DeviceError: when no plan has named such a buffer.
        """
        return [
            _Brought(head + b"".join(self.read_state(n, slot, a, b).tobytes() for n, a, b in rows))
            for head, rows in parts
        ]

    def restore(self, slot: int, parts: Sequence[tuple[Sequence[Rows], Bytes]]) -> None:
        """Bytes into rows, on every rank.

        Raises:
            DeviceError: when no plan has named such a buffer, or rows and bytes differ in size.
        """
        for rows, data in parts:
            olds = [self._named(name, 0)[slot, start:end] for name, start, end in rows]
            check_size(rows, sum(old.nbytes for old in olds), len(data))
            at = 0
            for (name, start, _), old in zip(rows, olds, strict=True):
                values = np.frombuffer(data, old.dtype, old.size, at).reshape(old.shape)
                self.write_state(name, slot, start, values)
                at += old.nbytes

    def _named(self, name: str, rank: int) -> Array:
        array = self._state[rank].get(name)
        if array is None:
            raise DeviceError(f"there is no state buffer {name!r}: compile a plan that has it")
        return array

    def state(self, ref: Ref, rank: int) -> Array:
        """The state buffer of a rank, allocated when first named."""
        array = self._state[rank].get(ref.name)
        if array is None:
            array = self._state[rank][ref.name] = np.zeros(ref.shape, _DTYPES[ref.dtype])
        if array.shape != ref.shape:
            raise DeviceError(
                f"state {ref} exists with shape {array.shape}: all plans need the same capacity"
            )
        return array

    def weight(self, ref: Ref, rank: int) -> Any:
        """A rank's weight in the reference operations' form, its shape checked."""
        value = self.weights.host(ref.name, rank)
        if value.shape != ref.shape:
            raise DeviceError(f"weight {ref} was loaded with shape {value.shape} on rank {rank}")
        return value


class NumpyRunner:
    """One plan bound to a backend: implements `Runner`."""

    def __init__(self, backend: NumpyBackend, plan: Plan) -> None:
        """Allocate io, bind every node."""
        self.plan, self._backend = plan, backend
        io = {r.name: np.zeros(r.shape, _DTYPES[r.dtype]) for r in plan.of_life(Life.IO)}
        self._env: list[dict[str, Array]] = [dict(io) for _ in range(backend.world)]
        self._calls = [self._bind(node) for node in plan.nodes]
        self._records: dict[int, list[dict[str, Array]]] = {}  # by place, of every rank
        self._times: dict[int, tuple[int, int]] = {}
        self._place = 0

    def run(self, span: slice | None = None) -> None:
        """Execute nodes in order, all ranks of one node before the next node."""
        for call in self._calls if span is None else self._calls[span]:
            if call.node.op.COLLECTIVE:
                self._run_collective(call)
                continue
            for fixed, env in zip(call.fixed, self._env, strict=True):
                arguments = fixed.copy()
                for index, name in call.named:
                    arguments[index] = env[name]
                self._store(call, env, call.reference(*arguments))

    def prepare(self) -> None:
        """Nothing is put off."""

    def launch(self, place: int = 0) -> None:
        """Execute the plan at once."""
        began = time.perf_counter_ns()
        self.run()
        self._times[place] = began, time.perf_counter_ns()
        # Copies: operations change results in place.
        self._records[place] = [
            {name: env[name].copy() for name in RESULTS if name in env} for env in self._env
        ]

    def wait(self, place: int = 0) -> None:
        """It is done already."""
        self._place = place
        for env, record in zip(self._env, self._records[place], strict=True):
            env |= record

    @property
    def times_ns(self) -> tuple[int, int]:
        """When the launch that was waited for last began and ended."""
        return self._times[self._place]

    def read(self, name: str, rank: int = 0) -> Array:
        """A buffer by name: io, scratch after the node that wrote it ran, or state.

        Raises:
            DeviceError: when the plan has no such buffer or nothing wrote it yet.
        """
        ref = self.plan.buffers.get(name)
        if ref is not None and ref.life is Life.STATE:
            return self._backend.state(ref, rank)
        value = self._env[rank].get(name)
        if value is None:
            raise DeviceError(f"plan {self.plan.name} holds no value for buffer {name!r} yet")
        return value

    def write(self, name: str, value: Array, place: int | None = None) -> None:
        """Put `value` into an io or scratch buffer of every rank; places share it.

        Raises:
            DeviceError: when the plan has no such buffer, or the shape differs.
        """
        ref = self.plan.buffers.get(name)
        if ref is None or ref.life not in (Life.IO, Life.SCRATCH):
            raise DeviceError(f"plan {self.plan.name} has no io or scratch buffer {name!r}")
        # A copy: operations may change io in place.
        array = np.array(value, dtype=_DTYPES[ref.dtype], order="C")
        if array.shape != ref.shape:
            raise DeviceError(f"buffer {ref} cannot take an array of shape {array.shape}")
        for env in self._env:
            env[name] = array

    def _bind(self, node: Node) -> _Call:
        op, world = node.op, self._backend.world
        fixed: list[list[Any]] = [[] for _ in range(world)]
        named: list[tuple[int, str]] = []
        for f in fields(op):
            value = getattr(op, f.name)
            if f.name in op.OUT:
                continue
            if isinstance(value, Ref) and value.life in (Life.SCRATCH, Life.IO):
                named.append((len(fixed[0]), value.name))
            for rank, arguments in enumerate(fixed):
                arguments.append(self._fixed(value, rank))
        out = tuple(ref.name for name, ref in op.refs if name in op.OUT)
        return _Call(node, type(op).reference, fixed, named, out)  # type: ignore[attr-defined]

    def _fixed(self, value: Any, rank: int) -> Any:
        if not isinstance(value, Ref):
            return value
        if value.life is Life.WEIGHT:
            return self._backend.weight(value, rank)
        return self._backend.state(value, rank) if value.life is Life.STATE else None

    def _run_collective(self, call: _Call) -> None:
        arguments = call.fixed[0].copy()
        for index, name in call.named:
            arguments[index] = [env[name] for env in self._env]
        result = call.reference(*arguments)
        for env in self._env:
            self._store(call, env, result)

    def _store(self, call: _Call, env: dict[str, Array], result: Any) -> None:
        values = result if len(call.out) > 1 else (result,)
        for name, value in zip(call.out, values, strict=False):
            if self._backend.check:
                _examine(call.node, self.plan.buffers[name], value)
            env[name] = value


def _examine(node: Node, ref: Ref, value: Array) -> None:
    """UF_CHECK: what a node wrote must be what the plan says."""
    where = f"node {node.label} wrote {ref}"
    if value.shape != ref.shape and value.size == np.prod(ref.shape):
        raise DeviceError(f"{where} with shape {value.shape}")
    if value.shape != ref.shape or value.dtype != _DTYPES[ref.dtype]:
        raise DeviceError(f"{where} with shape {value.shape} and type {value.dtype}")
    if value.dtype.kind == "f" and np.isnan(value).any():
        raise DeviceError(
            f"{where} with NaN in {int(np.isnan(value).sum())} of {value.size} places"
        )
    if ref.dtype == "bf16" and (np.ascontiguousarray(value).view(np.uint32) & 0xFFFF).any():
        raise DeviceError(f"{where} with values that are not bf16")
