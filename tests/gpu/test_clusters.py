"""Kernels whose CTAs work in clusters: hundreds of repeats, any number of rows, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from helpers.device import sized
from ultraflash.graphs.numerics import bf16_bits, bf16_from_bits
from ultraflash.graphs.ops.hc_mix import HcMix
from ultraflash.graphs.plan import Op, Plan, PlanBuilder, Ref
from ultraflash.graphs.release import release_model

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend

pytestmark = pytest.mark.gpu
Make = Callable[[PlanBuilder, int], Op]

MODEL = release_model()
ROWS, MANY = 7, 45  # a cluster a row; a cluster eight rows, the last one not full
REPEATS = sized(300, 50)


def mix(b: PlanBuilder, rows: int) -> Op:
    c, size = MODEL.hc, MODEL.hidden
    count, name = 2 * c + c * c, "layers.3.hc_attn"
    return HcMix(
        b.io("x", (rows, c, size), "bf16"),
        b.weight(f"{name}_fn", (count, c * size), "f32"),
        b.weight(f"{name}_scale", (3,), "f32"),
        b.weight(f"{name}_base", (count,), "f32"),
        b.io("pre", (rows, c), "f32"),
        b.io("post", (rows, c), "f32"),
        b.io("comb", (rows, c, c), "f32"),
        MODEL.sinkhorn_iters,
        MODEL.hc_eps,
        MODEL.norm_eps,
    )


def plan(make: Make, rows: int) -> Plan:
    b = PlanBuilder("alone", rows, 1)
    b.add("node", make(b, rows))
    return b.build()


@pytest.mark.parametrize("make", [mix], ids=["hc_mix"])
def test_repeats_and_rows_give_the_same_bits(make: Make, tmp_path: Path) -> None:
    from ultraflash.runtime.gpu.backend import CudaBackend
    from ultraflash.runtime.gpu.driver import Device
    from ultraflash.runtime.gpu.synthetic import place_weights

    few, many = plan(make, ROWS), plan(make, MANY)
    device = Device.open()
    weights = place_weights(few, MODEL, device, tmp_path)
    backend = CudaBackend(device, weights, tmp_path)
    op = few.nodes[0].op
    outputs = [ref.name for ref in op.writes()]
    x = np.random.default_rng(5).standard_normal((MANY, *few.buffers["x"].shape[1:]), np.float32)
    found: dict[int, list[bytes]] = {}
    for made in (few, many):
        rows = made.rows
        runner = backend.compile(made)
        runner.write("x", bf16_bits(0.2 * x[:rows]))
        seen = set()
        for _ in range(REPEATS):
            for name in outputs:
                runner.write(name, np.full_like(runner.read(name), -1))
            runner.run()
            got = [np.array(runner.read(name)) for name in outputs]
            seen.add(b"".join(value.tobytes() for value in got))
        assert len(seen) == 1, f"{len(seen)} different results of {REPEATS} repeats"
        found[rows] = [value[:ROWS].tobytes() for value in got]
    assert found[ROWS] == found[MANY]
    _compare(op, bf16_from_bits(bf16_bits(0.2 * x[:ROWS])), backend, found[ROWS])


def _compare(op: Op, x: np.ndarray, backend: CudaBackend, got: list[bytes]) -> None:
    """Against float64 on the very weights that the device holds."""
    from ultraflash.runtime.gpu.driver import download
    from ultraflash.runtime.weights.layout import layout_of

    def held(ref: Ref) -> np.ndarray:
        stored = np.empty(ref.shape, np.uint16 if ref.dtype == "bf16" else np.float32)
        assert layout_of(ref.name, ref.dtype) is None
        download(backend.weight(ref)[0], stored)
        return bf16_from_bits(stored) if ref.dtype == "bf16" else stored

    assert isinstance(op, HcMix)
    wanted = HcMix.reference(
        x, held(op.fn).astype(np.float64), held(op.scale), held(op.base), op.iterations, op.eps,
        op.norm_eps,
    )  # fmt: skip
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            np.frombuffer(one, np.float32), other.reshape(-1), rtol=3e-5, atol=1e-7
        )
