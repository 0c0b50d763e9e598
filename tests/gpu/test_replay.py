"""A hundred thousand replays of one graph: no hang, no leak, no drift.

A session decodes as the engine lets it, a hundred steps behind its prompt, and then the same again:
every round has to say what the first one said. UF_GPU_REPLAYS sets how many steps there are of each
width. Each step is queued before the record in front of it is read; printed are how long the device
was idle between two graphs, and what the host needed for its part, which it does meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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


class Took(NamedTuple):
    """A step's tokens; microseconds since the graph in front of it ended on the device, and from
    the end of that one, as the host saw it, until the host had queued the one behind.
    """

    tokens: tuple[int, ...]
    idle_us: float
    host_us: float


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
        first = [token for step in answered(rig, plans, request, rows) for token in step.tokens]
    state, runner = rig.everything(), plans.decode_runner(rows, 1)
    record = said(runner)
    assert len(set(first)) > 10, "a session that repeats itself would hide a drift"
    free, grown = free_bytes(), resident_bytes()
    idle: list[float] = []
    host: list[float] = []
    began = time.perf_counter()
    try:
        for turn in range(-(-REPLAYS // ROUND)):
            faulthandler.dump_traceback_later(SILENCE_S, exit=True)
            ids: list[int] = []
            for number, step in enumerate(answered(rig, plans, request, rows)):
                ids += step.tokens
                idle += [step.idle_us] if number else []
                host += [step.host_us] if 0 < number < ROUND - 1 else []
            assert ids == first, f"another answer in round {turn}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - began
    assert said(runner) == record
    wrong = [name for name, value in rig.everything().items() if value != state[name]]
    assert not wrong, f"state {wrong} drifted"
    leak, growth = free - free_bytes(), resident_bytes() - grown
    report(
        f"{REPLAYS} replays of {rows} rows in {seconds:.0f} s, "
        f"{len(first) / ROUND:.2f} tokens a step: device idle between graphs {spread(idle)}; "
        f"host's part of a step {spread(host)}; "
        f"device memory {leak:+d} bytes, host memory {growth:+d} bytes"
    )
    assert leak <= LEAK_BYTES, f"{leak} bytes of device memory are gone"
    assert growth <= GROWTH_BYTES, f"the process grew by {growth} bytes"


def spread(us: list[float]) -> str:
    """In microseconds."""
    p50, p90, p99, p999 = np.percentile(us, [50, 90, 99, 99.9])
    return f"p50 {p50:.1f} us, p90 {p90:.1f}, p99 {p99:.1f}, p99.9 {p999:.1f}"


def answered(rig: DeviceRig, plans: Plans, request: Generation, rows: int) -> Iterator[Took]:
    """A prompt and the steps behind it, as `Engine.step` runs them."""
    stream: Any = getattr(rig.backend, "stream", NoClock)
    runner: Any = plans.decode_runner(rows, 1)
    session = Session.start("replay", request, SLOT, rig.model.eos, rig.build.capacity.max_seq)
    result = None
    while session.waiting:
        part = session.chunk(CHUNK)
        result = plans.prefill(part, ends=len(part.ids) == session.waiting)
        session.done += len(part.ids)
    assert result, "a prompt ends with a result"
    session.take(result)
    ended_ns = 0
    for step in range(ROUND):
        seen_ns = stream.ended_ns
        ahead = step < ROUND - 1 and session.goes_on(rows)
        (result,) = plans.decode([session.verify(rows - 1)], ahead)
        host_us = 1e-3 * (stream.launched_ns - seen_ns)
        began_ns, last_ns = getattr(runner, "times_ns", (0, 0))
        idle_us, ended_ns = 1e-3 * (began_ns - ended_ns), last_ns
        session.advance(result)
        tokens, _ = session.take(result)
        yield Took(tokens, idle_us, host_us)


class NoClock:
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
