"""Products and gathers at the released model's full size: all experts, all rows of Engram's tables.

Weights and activations are made on the device (helpers/device_data.py), and every output is
compared with a plain float64 kernel over the same bytes (helpers/device_products.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from helpers.device import REHEARSAL, report
from helpers.device_cases import Case, cases, release_decode
from helpers.device_checks import Worst
from helpers.device_ops import CudaOps
from ultraflash.graphs.plan import Life

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REHEARSAL, reason="contents are made by the device's own kernels"),
]
WORLDS = (1, 4, 8)
_SPARE = 4 << 30  # bytes that are left for everything but weights


@cache
def whole_cases(world: int) -> tuple[Case, ...]:
    return cases(release_decode(world), whole=True)


def run_all(ops: CudaOps, world: int, kind: str, check: Callable[[Any], Worst | None]) -> None:
    """Each distinct shape; what does not fit into the GPU's memory is said."""
    from helpers.device_full import full
    from ultraflash.runtime.gpu.driver import memory

    chosen = [case for case in whole_cases(world) if type(case.op).__name__ == kind]
    ops.prepare(chosen)
    worst: list[Worst] = []
    wrong: list[str] = []
    seen = 0
    for case in chosen:
        size = sum(ref.nbytes for _, ref in case.op.refs if ref.life is Life.WEIGHT)
        if size + _SPARE > memory()[0]:
            report(f"world {world} {case.name}: {size / 2**30:.0f} GiB of weights do not fit")
            continue
        seen += 1
        with full(ops, case) as held:
            try:
                found = check(held)
            except AssertionError as error:
                wrong.append(f"{case.name}: {error}")
                continue
        worst += [found] if found else []
    assert seen, "nothing fitted"
    figures = ""
    if worst:
        largest, rms = max(w.largest for w in worst), max(w.rms for w in worst)
        figures = f": error over sum|xw| at most {largest:.2e}, rms {rms:.2e}"
    report(f"full size, world {world}, {kind}: {seen} shapes{figures}")
    assert not wrong, f"{len(wrong)} of {seen} differ\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("world", WORLDS)
def test_every_output_of_every_linear(ops: CudaOps, world: int) -> None:
    from helpers.device_full import check_linear

    run_all(ops, world, "Linear", check_linear)


@pytest.mark.parametrize("world", WORLDS)
def test_every_output_of_all_experts(ops: CudaOps, world: int) -> None:
    from helpers.device_full import check_down, check_up

    run_all(ops, world, "ExpertsUp", check_up)
    run_all(ops, world, "ExpertsDown", check_down)


def test_rows_from_all_over_an_engram_table(ops: CudaOps) -> None:
    """A table has 98 GB of codes: offsets need 64 bits."""
    from helpers.device_full import check_gather

    run_all(ops, 1, "EngramGather", check_gather)
