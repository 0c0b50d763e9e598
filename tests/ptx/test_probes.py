"""Kernels that are no operations of a plan: measuring memory, filling it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from ultraflash import ptx
from ultraflash.graphs.plan import Life, Op, Ref

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


def probes() -> list[Op]:
    """Each at every type that it is launched with."""
    from ultraflash.runtime.gpu.fill import FillCodes, FillNormal
    from ultraflash.tools.op_timer import StreamRead

    def ref(name: str, dtype: str) -> Ref:
        return Ref(name, (1, 64), dtype, Life.SCRATCH)

    normal = [FillNormal(ref("y", dtype), 0.0, 1.0, 1, 2, 3) for dtype in ("bf16", "f32")]
    read = StreamRead(Ref("x", (64,), "f32", Life.IO), Ref("y", (1,), "f32", Life.IO), 4)
    return [FillCodes(ref("y", "u8"), ref("table", "u8"), 1, 2, 3), *normal, read]


@pytest.mark.parametrize("arch", ptx.ARCHITECTURES)
def test_every_probe_compiles_without_spills(kernel_cache: Path, arch: str) -> None:
    from ultraflash.runtime.gpu.nvrtc import Unit, compile_unit

    kernels = [compile_unit(Unit.of(op), arch, kernel_cache) for op in probes()]
    assert [k.spill_bytes for k in kernels] == [0] * len(kernels)
    assert all(0 < k.registers <= 64 for k in kernels)


def test_every_probe_is_launched_by_somebody() -> None:
    files = {f"probes/{p.stem}" for p in (ptx.FOLDER / "probes").glob("*.cu")}
    assert {op.stem() for op in probes()} == files
