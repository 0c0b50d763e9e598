"""Single operations on the device against their references.

`run_case` makes inputs for a case, runs the kernel over poisoned outputs and compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from helpers.device import REHEARSAL
from helpers.device_cases import Case
from helpers.device_checks import Worst, check, check_ceilings
from helpers.device_inputs import HOST, Inputs, make_inputs
from helpers.device_weights import Shelf, Stored, reference_form
from ultraflash.graphs.plan import Life, Node, Op, Plan, Ref
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.interpret import NumpyBackend, NumpyRunner
from ultraflash.runtime.weights.layout import layout_of, scales_layout_of

Array = npt.NDArray[Any]
Outputs = dict[str, Array]  # field -> array, of everything that the operation wrote

COLUMNS = 384  # outputs of a large product that the reference computes


class Held(Protocol):
    """One operation, ready to run."""

    def run(self, made: Inputs) -> Outputs:
        """What the operation wrote, [OUT and UPDATES fields]."""


class Ops(Protocol):
    """Something that runs a single operation; `same_sums`: a product's bf16 output is its fp32
    output rounded."""

    same_sums: bool

    def prepare(self, chosen: Iterable[Case]) -> None:
        """Get ready for these cases."""

    def run(self, op: Op, made: Inputs) -> Outputs:
        """What the operation wrote, [OUT and UPDATES fields]."""

    def hold(self, op: Op, made: Inputs) -> Held:
        """The operation with the weights of `made`, to run often."""


def single(op: Op) -> Plan:
    """A plan of one node on one rank."""
    rows = next(ref for _, ref in op.refs).shape[0]
    return Plan("op", rows, 1, 1, (Node("op", op),), {ref.name: ref for _, ref in op.refs})


def poison(ref: Ref) -> Array:
    """Values that no operation writes: all bits set."""
    kind = np.dtype(np.uint16 if ref.dtype == "bf16" else HOST[ref.dtype])
    raw = np.full(ref.nbytes, 0xFF, np.uint8).view(kind).reshape(ref.shape)
    return np.full(ref.shape, np.nan, np.float32) if ref.dtype == "bf16" else raw


def written(op: Op) -> list[tuple[str, Ref]]:
    """(field, buffer) of everything that the operation fills or changes."""
    return [(name, ref) for name, ref in op.refs if name in op.OUT or name in op.UPDATES]


def units(chosen: Iterable[Case]) -> set[Any]:
    """What is compiled for these cases."""
    from ultraflash.runtime.gpu.nvrtc import Unit

    ops = [op for case in chosen for op in (case.op, in_f32(case.op)) if op is not None]
    return {Unit.of(op) for op in ops}


@dataclass(frozen=True)
class _CudaHeld:
    op: Op
    runner: Any

    def run(self, made: Inputs) -> Outputs:
        for name, ref in self.op.refs:
            if ref.life is Life.WEIGHT:
                continue
            if ref.life is Life.STATE:
                self.runner.write_state(ref, made[name])
            elif name not in self.op.OUT:
                self.runner.write(ref.name, made[name])
            elif ref.life is Life.SCRATCH:
                self.runner.poison(ref)
            else:
                self.runner.write(ref.name, poison(ref))
        self.runner.run(slice(None))
        return {name: np.array(self.runner.read(ref.name)) for name, ref in written(self.op)}


class CudaOps:
    """Kernels on the first GPU, launched one by one. Weights stay there once they were used."""

    same_sums = True

    def __init__(self) -> None:
        from ultraflash.runtime.gpu.driver import Device
        from ultraflash.runtime.gpu.uploader import Uploader

        self.device = Device.open()
        self._cache = prepare_cache_dir(RuntimeConfig.from_env())
        # Small buffers: weights come in several pieces, as large ones do.
        self.uploader = Uploader(self.device, self._cache, size=1 << 20)
        self._placed: dict[tuple[int, Any], tuple[Stored, tuple[int, ...]]] = {}
        self._weights = _Weights({})
        self._backends: dict[tuple[Ref, ...], Any] = {}

    def prepare(self, chosen: Iterable[Case]) -> None:
        """Compile what the cases need side by side, instead of one when it is its turn."""
        from ultraflash.runtime.gpu.nvrtc import compile_units

        compile_units(units(chosen), self.device.arch, self._cache)

    def run(self, op: Op, made: Inputs) -> Outputs:
        held = self.hold(op, made)
        outputs = held.run(made)
        held.runner.close()
        return outputs

    def hold(self, op: Op, made: Inputs) -> _CudaHeld:
        for field, ref in op.refs:
            if ref.life is Life.WEIGHT:
                self._weights.placed[ref.name] = self._place(ref, made[field])
        return _CudaHeld(op, self._backend(op).compile(single(op)))

    def _backend(self, op: Op) -> Any:
        """One for all operations with the same state: each holds pinned memory and threads."""
        from ultraflash.runtime.gpu.backend import CudaBackend

        state = tuple(sorted({ref for _, ref in op.refs if ref.life is Life.STATE}, key=str))
        if state not in self._backends:
            weights: Any = self._weights
            self._backends[state] = CudaBackend(
                self.device, weights, self._cache, keep_scratch=True
            )
        return self._backends[state]

    def _place(self, ref: Ref, stored: Stored) -> tuple[int, ...]:
        layout = layout_of(ref.name, ref.dtype)
        key = id(stored), layout
        if key not in self._placed:  # `stored` is kept, so its id is not used again
            codes, *scales = [list(a) if a.ndim == 3 else [a] for a in stored.arrays]
            addresses = [self.uploader.place(ref.name, codes, layout)]
            form = scales_layout_of(ref.dtype)
            addresses += [self.uploader.place(ref.name, parts, form) for parts in scales]
            self.uploader.wait()
            self._placed[key] = stored, tuple(addresses)
        return self._placed[key][1]


@dataclass(frozen=True)
class _Weights:
    """Stands in for the weights of a checkpoint on the device."""

    placed: dict[str, tuple[int, ...]]

    def addresses(self, ref: Ref) -> tuple[int, ...]:
        return self.placed[ref.name]


@dataclass(frozen=True)
class _NumpyHeld:
    op: Op
    backend: NumpyBackend
    runner: NumpyRunner

    def run(self, made: Inputs) -> Outputs:
        for name, ref in self.op.refs:
            if ref.life is Life.STATE:
                self.backend.state(ref, 0)[...] = made[name]
            elif ref.life is not Life.WEIGHT:
                fresh = name in self.op.OUT
                self.runner.write(ref.name, poison(ref) if fresh else made[name].copy())
        self.runner.run()
        return {name: np.array(self.runner.read(ref.name)) for name, ref in written(self.op)}


class NumpyOps:
    """The interpreter in the device's place: what the cases are tried with on a CPU."""

    same_sums = False  # rounded from float64 at once

    def prepare(self, chosen: Iterable[Case]) -> None:
        """Nothing is compiled here."""

    def run(self, op: Op, made: Inputs) -> Outputs:
        return self.hold(op, made).run(made)

    def hold(self, op: Op, made: Inputs) -> Held:
        weights: Any = _HostWeights(op, made)
        backend = NumpyBackend(weights, check=True)
        return _NumpyHeld(op, backend, backend.compile(single(op)))


@dataclass(frozen=True)
class _HostWeights:
    op: Op
    made: Inputs

    def host(self, name: str, rank: int) -> Any:
        field = next(f for f, ref in self.op.refs if ref.name == name)
        return reference_form(self.op, field, self.made[field])


def open_ops() -> Ops:
    """The device; in a rehearsal the interpreter."""
    return NumpyOps() if REHEARSAL else CudaOps()


# --- comparing ---


@dataclass(frozen=True)
class Sample:
    """Which output columns of a product the reference computes; None: all."""

    columns: Array | None = None

    def of(self, op: Op, outputs: Outputs) -> Outputs:
        if self.columns is None:
            return outputs
        return {name: array[..., self.columns] for name, array in outputs.items()}


def sample(op: Op, rng: np.random.Generator) -> Sample:
    """Some columns of a large product, as many from each output group."""
    kind = type(op).__name__
    if kind not in ("Linear", "ExpertsUp", "ExpertsDown"):
        return Sample()
    weight: Ref = getattr(op, {"Linear": "w", "ExpertsUp": "w1", "ExpertsDown": "w2"}[kind])
    size, groups = weight.shape[-2], getattr(op, "groups", 1)
    each, part = COLUMNS // groups, size // groups
    if size <= 2 * COLUMNS:
        return Sample()
    picked = [g * part + np.sort(rng.permutation(part)[:each]) for g in range(groups)]
    return Sample(np.concatenate(picked))


def reference(op: Op, made: Inputs, some: Sample) -> Outputs:
    """What the operation's reference writes; only sampled columns where `some` says so."""
    arguments: list[Any] = []
    updated: Outputs = {}
    for f in fields(op):
        value = getattr(op, f.name)
        if f.name in op.OUT:
            continue
        if isinstance(value, Ref):
            value = made[f.name]
            if isinstance(value, Stored):
                columns = some.columns if value.dtype != "rows8" else None
                value = reference_form(op, f.name, value, columns)
        if f.name in op.UPDATES and value is not None:
            value = updated[f.name] = value.copy()
        arguments.append(value)
    result = type(op).reference(*arguments)  # type: ignore[attr-defined]
    names = [name for name, _ in op.refs if name in op.OUT]
    values = result if len(names) > 1 else (result,)
    return updated | dict(zip(names, values, strict=False))


def in_f32(op: Any) -> Any:
    """A product with its sums in fp32 instead of rounded to bf16; None if it is no product."""
    if type(op).__name__ not in ("Linear", "ExpertsDown"):
        return None
    return replace(op, y=replace(op.y, dtype="f32"), rounded=False)


def run_case(ops: Ops, case: Case, shelf: Shelf, trial: int = 0) -> Worst | None:
    """One operation over fresh inputs; odd trials stand near position 0 and have idle rows.

    Products also run with fp32 output, whose error has ceilings; their bf16 output is these very
    sums rounded. What comes back is the largest error against the ceilings.
    """
    op, rng = case.op, case.rng(trial)
    made = make_inputs(op, rng, shelf, early=trial % 2 == 1)
    got, some = ops.run(op, made), sample(op, rng)
    sums = in_f32(op)
    if sums is None:
        check(op, made, some, some.of(op, got), reference(op, made, some))
        return None
    wide = ops.run(sums, made)
    for array in (got["y"], wide["y"]):
        assert np.isfinite(array).all(), f"{int((~np.isfinite(array)).sum())} sums are missing"
    return check_ceilings(
        op, got["y"], wide["y"], some.of(op, wide)["y"],
        reference(sums, made, some)["y"], reference(sums, magnitudes(made), some)["y"],
        ops.same_sums,
    )  # fmt: skip


def magnitudes(made: Inputs) -> Inputs:
    """The same product of absolute values: the scale of its errors."""

    def positive(value: Any) -> Any:
        if not isinstance(value, Stored):
            return np.abs(value)
        return _Magnitudes(value.shape, value.dtype, value.codes, value.scales)

    return {name: positive(value) for name, value in made.items()}


class _Magnitudes(Stored):
    """A weight whose values are all positive."""

    def values(self, rows: Array | None = None) -> Array:
        return np.abs(super().values(rows))
