"""A hundred thousand replays of one graph: no hang, no leak, no drift.

A session decodes as the engine lets it, a hundred steps behind its prompt, and then the same again:
every round has to say what the first one said. UF_GPU_REPLAYS sets how many steps there are of each
width. What the host needs between two graphs is printed.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.device import BACKEND, REHEARSAL, count, report
from helpers.device_rig import BLOCK, CHUNK, OF_ROW, OF_SEQUENCE, TINY, DeviceRig
from ultraflash.runtime.backend import Runner
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.plans import Plans
from ultraflash.runtime.request import Generation, Sampling
from ultraflash.runtime.session import Session

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]

REPLAYS = count("UF_GPU_REPLAYS", 100_000, 200)
ROUND = 100  # steps behind a prompt
SILENCE_S = 120  # a round takes a fraction of a second: longer is a hang
LEAK_BYTES, GROWTH_BYTES = 4 << 20, 32 << 20
SLOT, PROMPT = 1, tuple(np.random.default_rng(1).integers(3, 480, 40).tolist())


SAMPLING = Sampling(1.1, 0.95, 50, seed=5)


@pytest.fixture(scope="module")
def rig() -> DeviceRig:
    return DeviceRig(kept=False, max_seq=1024)


@pytest.fixture(scope="module")
def plans(rig: DeviceRig) -> Plans:
    config = RuntimeConfig.from_env(checkpoint=TINY, backend=BACKEND)
    return Plans(rig.build, rig.backend, replace(config, prefill_chunks=(CHUNK,)))


@pytest.mark.parametrize("rows", [1, 8])
def test_replays(rig: DeviceRig, plans: Plans, rows: int) -> None:
    request = Generation(PROMPT, (ROUND + 2) * (BLOCK + 1), SAMPLING, ignore_eos=True)
    for _ in range(2):  # graphs are captured, memory is as it stays
        first = [token for tokens, _ in answered(rig, plans, request, rows) for token in tokens]
    state, runner = rig.everything(), plans.decode_runner(rows, 1)
    record = said(runner)
    assert len(set(first)) > 10, "a session that repeats itself would hide a drift"
    free, grown = free_bytes(), resident_bytes()
    gaps: list[float] = []
    began = time.perf_counter()
    try:
        for number in range(-(-REPLAYS // ROUND)):
            faulthandler.dump_traceback_later(SILENCE_S, exit=True)
            ids: list[int] = []
            for tokens, gap_us in answered(rig, plans, request, rows):
                ids += tokens
                gaps += [gap_us] if gap_us >= 0 else []
            assert ids == first, f"another answer in round {number}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - began
    assert said(runner) == record
    wrong = [name for name, value in rig.everything().items() if value != state[name]]
    assert not wrong, f"state {wrong} drifted"
    leak, growth = free - free_bytes(), resident_bytes() - grown
    between = np.percentile(gaps, [50, 90, 99, 99.9])
    report(
        f"{REPLAYS} replays of {rows} rows in {seconds:.0f} s, "
        f"{len(first) / ROUND:.2f} tokens a step: host between graphs p50 {between[0]:.1f} us, "
        f"p90 {between[1]:.1f}, p99 {between[2]:.1f}, p99.9 {between[3]:.1f}; "
        f"device memory {leak:+d} bytes, host memory {growth:+d} bytes"
    )
    assert leak <= LEAK_BYTES, f"{leak} bytes of device memory are gone"
    assert growth <= GROWTH_BYTES, f"the process grew by {growth} bytes"


def answered(
    rig: DeviceRig, plans: Plans, request: Generation, rows: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """A prompt and the steps behind it, as `Engine.step` runs them: tokens of each step, and what
    the host needed between its graph and the next, in microseconds."""
    stream: Any = getattr(rig.backend, "stream", Clock())
    session = Session.start("replay", request, SLOT, rig.model.eos, rig.build.capacity.max_seq)
    result = None
    while session.waiting:
        part = session.chunk(CHUNK)
        result = plans.prefill(part, ends=len(part.ids) == session.waiting)
        session.done += len(part.ids)
    assert result, "a prompt ends with a result"
    session.take(result)
    for step in range(ROUND):
        (result,) = plans.decode(
            [session.verify(rows - 1)],
            (lambda results: session.goes_on(*results)) if step < ROUND - 1 else None,
        )
        gap_us = 1e-3 * (stream.launched_ns - stream.ended_ns)  # below 0: nothing was launched
        session.advance(result)
        tokens, _ = session.take(result)
        yield tokens, gap_us


class Clock:
    """What stands for a stream where there is none."""

    launched_ns = ended_ns = 0


def said(runner: Runner) -> dict[str, bytes]:
    """The whole record of the latest step."""
    return {name: runner.read(f"io.{name}").tobytes() for name in OF_SEQUENCE + OF_ROW}


def free_bytes() -> int:
    """Free memory of the device."""
    if REHEARSAL:
        return 0
    from ultraflash.runtime.gpu.driver import memory

    return memory()[0]


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
