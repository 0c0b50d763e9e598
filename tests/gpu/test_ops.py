"""Every kernel against its reference: fresh random inputs, poisoned outputs, every shape that the
tiny model's plans have, and the released model's at worlds 1, 4 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest

from helpers.device import REHEARSAL, report, sized
from helpers.device_cases import Case, release_cases, tiny_cases
from helpers.device_checks import Worst
from helpers.device_ops import Ops, run_case
from helpers.device_weights import Shelf
from ultraflash.graphs.ops.follow_rows import FollowRows
from ultraflash.graphs.plan import Life

pytestmark = pytest.mark.gpu

WORLDS = (1, 4, 8)
TINY_TRIALS, RELEASE_TRIALS = sized(4, 1), sized(2, 1)


def kinds(found: Callable[[], tuple[Case, ...]]) -> list[str]:
    return sorted({type(case.op).__name__ for case in found()})


def fits_here(case: Case) -> bool:
    """The interpreter has no room for the largest weights as float64."""
    sizes = [prod(ref.shape) for _, ref in case.op.refs if ref.life is Life.WEIGHT]
    return not REHEARSAL or max(sizes, default=0) < 3e7


def run_all(ops: Ops, shelf: Shelf, chosen: list[Case], trials: int, title: str) -> None:
    """All of them, then one failure that names each that is wrong."""
    ops.prepare(chosen)
    wrong: dict[str, str] = {}
    worst: list[Worst] = []
    for case in chosen:
        for trial in range(trials):
            try:
                found = run_case(ops, case, shelf, trial)
            except AssertionError as error:
                wrong.setdefault(case.name, f"trial {trial}: {error}")
                continue
            worst += [found] if found else []
    if worst:
        largest, rms = max(w.largest for w in worst), max(w.rms for w in worst)
        report(f"{title}: error over sum|xw| at most {largest:.2e}, rms {rms:.2e}")
    lines = [f"{name}: {text}" for name, text in wrong.items()]
    assert not wrong, f"{len(wrong)} of {len(chosen)} differ\n" + "\n".join(lines[:20])


@pytest.mark.parametrize("kind", kinds(tiny_cases))
def test_tiny(ops: Ops, shelf: Shelf, kind: str) -> None:
    chosen = [case for case in tiny_cases() if type(case.op).__name__ == kind]
    run_all(ops, shelf, chosen, TINY_TRIALS, f"tiny {kind}")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", kinds(lambda: release_cases(1)))
def test_release(ops: Ops, shelf: Shelf, kind: str, world: int) -> None:
    chosen = [case for case in release_cases(world) if type(case.op).__name__ == kind]
    chosen = [case for case in chosen if fits_here(case)]
    run_all(ops, shelf, chosen, RELEASE_TRIALS, f"world {world} {kind}")


def test_the_device_decides_as_the_host_does(ops: Ops, shelf: Shelf) -> None:
    """Many more times than other operations are tried: a seed repeats whoever decides."""
    chosen = [case for case in tiny_cases() if isinstance(case.op, FollowRows)]
    run_all(ops, shelf, chosen, sized(100, 20), "follow_rows")
