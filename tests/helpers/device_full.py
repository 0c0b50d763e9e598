"""Operations at their full size on the device: weights are made there and never leave it.

They are made in the checkpoint's own form, which products are recomputed from, and laid out for
kernels beside it (runtime/weights/layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2, prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers import counted
from helpers.compare import assert_same_bits
from helpers.counted import Recipe, seed_of
from helpers.device_cases import Case
from helpers.device_checks import Worst, assert_close, check_ceilings
from helpers.device_ops import CudaOps, in_f32, single
from helpers.device_products import exact_product
from helpers.formats import bf16
from ultraflash.graphs.numerics import q8_decode
from ultraflash.graphs.ops.swiglu import swiglu
from ultraflash.graphs.plan import Life, Ref
from ultraflash.runtime.weights.layout import Fp4Scales, Relayout, layout_of, scales_layout_of

Array = npt.NDArray[Any]
_RMS = {"fp8": 150, "fp4": 3}  # of codes alone
_SUM_ERROR = 2.0**-20  # of the sum of magnitudes; the largest that was seen is a quarter of it


def weight_recipes(ref: Ref) -> list[tuple[int, Recipe]]:
    """(elements, recipe) of each of a weight's allocations, as a checkpoint stores them."""
    shape, fan = ref.shape, ref.shape[-1]
    if ref.dtype == "rows8":
        return [
            (prod(shape), counted.codes8()),
            (prod(shape) // 32, counted.bytes_between(117, 123)),
        ]
    if ref.dtype in _RMS:
        middle = 127 - round(log2(_RMS[ref.dtype] * fan**0.5))
        scales = counted.bytes_between(middle - 3, middle + 3)
        if ref.dtype == "fp4":
            return [(prod(shape) // 2, counted.codes4()), (prod(shape) // 32, scales)]
        blocks = prod(shape[:-2]) * -(-shape[-2] // 32) * -(-fan // 32)
        return [(prod(shape), counted.codes8()), (blocks, scales)]
    make = counted.normal16 if ref.dtype == "bf16" else counted.normal32
    return [(prod(shape), make(fan**-0.5))]


@dataclass(frozen=True)
class Full:
    """One operation whose weights lie on the device in the checkpoint's own form."""

    ops: CudaOps
    op: Any
    seed: str
    raw: dict[str, tuple[int, ...]]  # field -> addresses of a weight as a checkpoint stores it
    laid: dict[str, tuple[int, ...]]  # and as kernels read it

    def runner(self, op: Any) -> Any:
        """The operation (or it with another output type) over these weights."""
        from ultraflash.runtime.gpu.backend import CudaBackend

        placed = {getattr(op, field).name: at for field, at in self.laid.items()}
        weights: Any = SimpleNamespace(addresses=lambda ref: placed[ref.name])
        backend = CudaBackend(self.ops.device, weights, self.ops._cache, keep_scratch=True)
        return backend.compile(single(op))

    def make(self, runner: Any, field: str, recipe: Recipe) -> int:
        """Fill an input on the device; its address."""
        from helpers.device_data import fill

        ref = getattr(self.op, field)
        (address,) = runner._addresses(ref)
        fill(address, prod(ref.shape), recipe, seed_of(f"{self.seed} {field}"))
        return int(address)

    def run(self, runner: Any) -> Array:
        """What it writes over poison."""
        ref = runner.plan.nodes[0].op.y
        runner.poison(ref)
        runner.run(slice(None))
        y = np.array(runner.read(ref.name))
        assert np.isfinite(y).all(), f"{int((~np.isfinite(y)).sum())} outputs are missing"
        return y


@contextmanager
def full(ops: CudaOps, case: Case) -> Iterator[Full]:
    """An operation with weights of its own, which are given back at the end."""
    from helpers.device_data import fill
    from ultraflash.runtime.gpu.driver import allocate, release

    held: list[int] = []

    def room(size: int) -> int:
        held.append(allocate(size, f"a weight of {case.name}"))
        return held[-1]

    raw: dict[str, tuple[int, ...]] = {}
    laid: dict[str, tuple[int, ...]] = {}
    try:
        for field, ref in case.op.refs:
            if ref.life is not Life.WEIGHT:
                continue
            parts = []
            for part, (count, recipe) in enumerate(weight_recipes(ref)):
                parts.append(room(count * np.dtype(recipe.dtype).itemsize))
                fill(parts[-1], count, recipe, seed_of(f"{case.name} {field} {part}"))
            raw[field] = tuple(parts)
            layouts = layout_of(ref.name, ref.dtype), scales_layout_of(ref.dtype)
            laid[field] = tuple(
                _lay_out(ops, layout, at, ref.shape, room) if layout else at
                for at, layout in zip(parts, layouts, strict=False)
            )
        yield Full(ops, case.op, case.name, raw, laid)
    finally:
        for address in held:
            release(address)


def _lay_out(
    ops: CudaOps, layout: type[Relayout], address: int, shape: tuple[int, ...],
    room: Callable[[int], int],
) -> int:  # fmt: skip
    """What the kernel of a layout makes of each matrix of a stack."""
    from ultraflash.runtime.gpu import args
    from ultraflash.runtime.gpu.driver import Function, Stream
    from ultraflash.runtime.gpu.nvrtc import Unit, compile_unit

    columns = shape[-1] // (32 if layout is Fp4Scales else 1)
    op, count = layout.of(shape[-2], columns), prod(shape[:-2])
    out, unit, launch = room(count * op.y.nbytes), Unit.of(op), op.launch(ops.device.arch)
    cubin = compile_unit(unit, ops.device.arch, ops._cache).cubin
    function, stream = Function(cubin, unit.entry), Stream()
    for number in range(count):
        places = {op.x: (address + number * op.x.nbytes,), op.y: (out + number * op.y.nbytes,)}
        packed = args.pack(op, places.__getitem__)
        stream.launch(function, launch.grid, launch.block, launch.shared, packed)
    stream.wait()
    return out


def _activations(dtype: str) -> Recipe:
    quantised = dtype in ("fp8", "fp4")
    return counted.activations8(117, 122) if quantised else counted.normal16(1)


def check_linear(held: Full) -> Worst:
    """Every output of a matrix product."""
    op: Any = held.op
    recipe = _activations(op.w.dtype)
    plain, wide = held.runner(op), held.runner(in_f32(op))
    held.make(plain, "x", recipe)
    x = held.make(wide, "x", recipe)
    want, scale = exact_product(
        (x, op.x.shape), op.w.dtype, op.w.shape, held.raw["w"], groups=op.groups
    )
    sums = held.run(wide)
    return check_ceilings(op, held.run(plain), sums, sums, want, scale, same_sums=True)


def check_down(held: Full) -> Worst:
    """Every output of every chosen expert."""
    op: Any = held.op
    ids, z = _routing(held, op.w2.shape[0]), _activations("fp4")
    rows, places, size = op.z.shape
    found = []
    for each in (op, in_f32(op)):
        runner = held.runner(each)
        runner.write(op.ids.name, ids)
        at = held.make(runner, "z", z)
        found.append(held.run(runner).reshape(rows * places, -1))
    want, scale = exact_product(
        (at, (rows * places, size)), "fp4", op.w2.shape, held.raw["w2"], which=ids
    )
    return check_ceilings(op, found[0], found[1], found[1], want, scale, same_sums=True)


def check_up(held: Full) -> None:
    """Every output: at most as far off as a rounding of gate or up that fell to the other side,
    and where either nearly cancels to zero, as the error of its sum.
    """
    op: Any = held.op
    ids, runner = _routing(held, op.w1.shape[0]), held.runner(op)
    runner.write(op.ids.name, ids)
    share = counted.uniform32(0.01, 1.5).at(seed_of(held.seed), np.arange(ids.size))
    runner.write(op.weight.name, share.reshape(ids.shape))
    x = held.make(runner, "x", _activations("fp4")), op.x.shape
    y = held.run(runner).reshape(ids.size, -1)
    (gate, gates), (up, ups) = (
        exact_product(x, "fp4", op.w1.shape, held.raw[name], which=ids) for name in ("w1", "w3")
    )
    factor = share.reshape(-1, 1)
    want = bf16(factor * swiglu(bf16(gate), bf16(up), op.limit))
    low, high = np.minimum(gate, op.limit), np.abs(up).clip(None, op.limit)
    smooth = np.abs(low) / (1 + np.exp(-low))
    flipped = 2.0**-7 * (1.1 * np.abs(low) + smooth) * high
    summed = _SUM_ERROR * (1.1 * gates * high + smooth * ups)
    assert_close(y, want, (flipped + summed) * factor, 0.02)


def check_gather(held: Full) -> None:
    """Rows from all over a table, first and last among them, against the host's own."""
    op: Any = held.op
    count, dim = op.table.shape
    rng = np.random.default_rng(int(seed_of(held.seed)))
    rows = rng.integers(0, count, op.rows.shape)
    rows[0, :2] = 0, count - 1
    runner = held.runner(op)
    runner.write(op.rows.name, rows)
    parts = []
    for part, (per_row, (_, recipe)) in enumerate(
        zip((dim, dim // 32), weight_recipes(op.table), strict=True)
    ):
        at = rows.reshape(-1, 1).astype(np.uint64) * np.uint64(per_row)
        index = at + np.arange(per_row, dtype=np.uint64)
        parts.append(recipe.at(seed_of(f"{held.seed} table {part}"), index))
    assert_same_bits(held.run(runner), q8_decode(*parts).reshape(len(rows), -1))


def _routing(held: Full, experts: int) -> npt.NDArray[np.int32]:
    rows, k = held.op.ids.shape
    return counted.choices(seed_of(f"{held.seed} ids"), rows, k, experts)
