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
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers.device import BACKEND, REHEARSAL, count, report
from helpers.device_rig import BLOCK, CHUNK, OF_ROW, OF_SEQUENCE, TINY, DeviceRig
from helpers.engines import ahead, open_engine
from ultraflash.graphs.width import Rule
from ultraflash.runtime import Engine
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
MOST_IDLE_US = 15  # between two graphs, at p99
ROWS = 6  # of the engine's steps: a block of five drafts
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
    ended_ns, rule = 0, Rule.everything(BLOCK, rows, 1)
    for step in range(ROUND):
        seen_ns = stream.ended_ns
        ahead = rows if step < ROUND - 1 and session.goes_on else 0
        (result,) = plans.decode([session.verify()], rule, ahead)
        host_us = 1e-3 * (stream.launched_ns - seen_ns)
        began_ns, last_ns = runner.times_ns
        idle_us, ended_ns = 1e-3 * (began_ns - ended_ns), last_ns
        session.advance(result)
        tokens, _ = session.take(result)
        yield Took(tokens, idle_us, host_us)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("replay")
    opened = open_engine(folder, backend=BACKEND, max_seq=256, store_bytes=0, max_rows=ROWS)
    yield ahead(opened) if REHEARSAL else opened
    opened.close()


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), SAMPLING], ids=["greedy", "seeded"])
def test_the_engines_loop_never_waits_for_the_host(engine: Engine, sampling: Sampling) -> None:
    """With drafts, of which the device chooses how many a step verifies."""
    ask = Generation(PROMPT, 2 * ROUND, sampling, ignore_eos=True)
    waiting: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_repeats", lambda sessions: False)
        looped(engine, ask, [])  # graphs are captured
        widths, want = looped(engine, ask, waiting)
        patch.setattr(engine._backend, "places", 1, raising=False)
        assert looped(engine, ask, [])[1] == want, "the host chooses otherwise"
    idle: list[float] = []
    steps = rounds = 0
    began = time.perf_counter()
    while steps < REPLAYS:
        faulthandler.dump_traceback_later(SILENCE_S, exit=True)
        rows, answer = looped(engine, ask, idle)
        faulthandler.cancel_dump_traceback_later()
        assert answer == want, f"another answer in round {rounds}"
        assert not sampling.temperature or rows == widths, f"other widths in round {rounds}"
        steps, rounds = steps + len(rows), rounds + 1
    report(
        f"{steps} steps of {rounds} {'seeded' if sampling.temperature else 'greedy'} answers in "
        f"{time.perf_counter() - began:.0f} s, rows {dict(sorted(Counter(widths).items()))}: "
        f"device idle {spread(idle)}; launched behind records {spread(waiting)}"
    )
    assert len(idle) > 0.8 * steps, "most steps are queued ahead"
    if not REHEARSAL:
        assert np.percentile(idle, 99) <= MOST_IDLE_US


def looped(engine: Engine, ask: Generation, idle: list[float]) -> tuple[list[int], list[int]]:
    """Rows of each decode step of an answer, and its tokens. `idle` takes microseconds between the
    graphs of two steps, of those that were queued ahead or, where none is, of all.
    """
    plans, ended_ns = engine._plans, 0
    rows: list[int] = []
    tokens: list[int] = []
    queued: list[tuple[bool, float]] = []
    engine.submit("loop", ask)
    while engine.has_work:
        before = plans._ahead
        for step in engine.step():
            tokens += step.tokens
            if step.rows:  # not the end of the prompt
                assert plans._last
                began_ns, last_ns = plans._last.times_ns
                queued.append((before is not None, 1e-3 * (began_ns - ended_ns)))
                rows.append(step.rows)
                ended_ns = last_ns
    some = any(ahead for ahead, _ in queued)
    idle += [us for ahead, us in queued[1:] if ahead or not some]
    return rows, tokens


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
