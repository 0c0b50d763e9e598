"""A hundred thousand replays of a graph: no hang, no leak, no drift.

UF_GPU_REPLAYS sets how many. What the host needs between two graphs is printed.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.device import REHEARSAL, count, report
from helpers.device_rig import OF_ROW, OF_SEQUENCE, DeviceRig
from ultraflash.runtime.backend import Runner
from ultraflash.runtime.step_io import Draw, Part, write_step

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]

REPLAYS = count("UF_GPU_REPLAYS", 100_000, 200)
CHECKS = 10  # comparisons with the first result
SILENCE_S = 120  # a hundredth of the replays takes seconds: longer is a hang
LEAK_BYTES, GROWTH_BYTES = 4 << 20, 32 << 20


@pytest.fixture(scope="module")
def rig() -> DeviceRig:
    return DeviceRig(kept=False)


@dataclass(frozen=True)
class Kind:
    """A width, and how tokens are chosen. Drafts that are sampled would be verified against what
    the step before drew: eight rows are greedy, so that every replay says the same."""

    rows: int
    draw: Draw


SAMPLED = Draw(1.1, 0.95, 50, seed=5, step=3, want_logprobs=True)
KINDS = [Kind(1, SAMPLED), Kind(8, Draw(want_logprobs=True))]


@pytest.mark.parametrize("kind", KINDS, ids=["rows1", "rows8"])
def test_replays(rig: DeviceRig, kind: Kind) -> None:
    ids = np.random.default_rng(kind.rows).integers(3, 480, 40).tolist()
    out = rig.prompt(1, ids, kind.draw)
    part = Part(1, len(ids), [out.token, *out.drafts[: kind.rows - 1]], kind.draw)
    runner = rig.runner("decode", kind.rows)
    launch, wait = launching(rig, runner)
    write_step(runner, [part])
    for _ in range(20):  # the graph is captured, memory is as it stays
        launch()
        wait()
    first, state = said(runner), rig.everything()
    free, grown = free_bytes(), resident_bytes()
    gaps, started = [], time.perf_counter()
    piece = max(1, REPLAYS // 100)
    try:
        for done in range(piece, REPLAYS + 1, piece):
            faulthandler.dump_traceback_later(SILENCE_S, exit=True)
            gaps.append(replay(runner, part, launch, wait, piece))
            if done % max(1, REPLAYS // CHECKS) < piece:
                assert said(runner) == first, f"another result after {done} replays"
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - started
    assert said(runner) == first
    wrong = [name for name, value in rig.everything().items() if value != state[name]]
    assert not wrong, f"state {wrong} drifted"
    leak, growth = free - free_bytes(), resident_bytes() - grown
    gap = np.concatenate(gaps)
    report(
        f"{REPLAYS} replays of {kind.rows} rows in {seconds:.0f} s: host between graphs "
        f"p50 {np.percentile(gap, 50):.1f} us, p99 {np.percentile(gap, 99):.1f} us; "
        f"device memory {leak:+d} bytes, host memory {growth:+d} bytes"
    )
    assert leak <= LEAK_BYTES, f"{leak} bytes of device memory are gone"
    assert growth <= GROWTH_BYTES, f"the process grew by {growth} bytes"


def replay(
    runner: Runner, part: Part, launch: Callable[[], None], wait: Callable[[], None], times: int
) -> np.ndarray:
    """Replay and do what every step needs of the host: read the record, write ids and positions.

    What comes back are microseconds from the end of each wait until the next graph is launched.
    """
    ids = np.array(part.ids, np.int32)
    position = np.arange(part.start, part.start + len(ids), dtype=np.int32)
    now = time.perf_counter_ns
    gaps = np.empty(times)
    ended = now()
    for i in range(times):
        runner.read("io.accepted").tolist()
        runner.read("io.token").tolist()
        runner.read("io.drafts").tolist()
        runner.write("io.ids", ids)
        runner.write("io.position", position)
        launch()
        gaps[i] = now() - ended
        wait()
        ended = now()
    return gaps / 1e3


def launching(rig: DeviceRig, runner: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """How to launch the runner's graph, and how to wait for it."""
    if REHEARSAL:
        return runner.run, lambda: None
    stream: Any = rig.backend
    return runner.launch, stream.stream.wait


def said(runner: Runner) -> dict[str, bytes]:
    """The whole record of the latest step."""
    return {name: runner.read(f"io.{name}").tobytes() for name in OF_SEQUENCE + OF_ROW}


def free_bytes() -> int:
    """Free memory of the device."""
    if REHEARSAL:
        return 0
    from ultraflash.runtime.gpu import driver

    bindings: Any = vars(driver)["cu"]
    free, _ = driver.check(bindings.cuMemGetInfo(), "reading the memory size")
    return int(free)


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
