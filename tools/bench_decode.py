"""Time decode steps on one GPU as the engine's loop pays them: write io, launch, wait, read.

Every width has its graph, captured before the clock starts. Tokens are random and nothing is
verified: a step takes the same time whatever it says. Beside the step's own time stand what the GPU
needs for the graph alone and what a step has to read at least, compared with a kernel that only
reads, measured in the same run. With --weights synthetic one GPU is one rank of a world: a shard
step, emulated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.width import Rule
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.request import Generation, Sampling
from ultraflash.runtime.session import Session
from ultraflash.runtime.step_io import Draw, Part, write_step
from ultraflash.tools import gpu_arguments
from ultraflash.tools.op_shares import by_op, node_us, share_lines
from ultraflash.tools.routing import (
    ROUTINGS,
    Distinct,
    bytes_to_read,
    measured_distinct,
    tokens,
)
from ultraflash.tools.shard import SLOT, Shard, add_arguments, open_shard, positions
from ultraflash.tools.speed_table import append, commit, csv_file, driver, today

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend
    from ultraflash.runtime.gpu.runner import CudaRunner

_READ = ("io.accepted", "io.token", "io.drafts", "io.confidence")
_FEWEST_STEPS = 6  # that a context has room for: one to begin with, one behind the last
_SPAN = 1024  # positions that the steps of one measurement move over
_ID, _ENDLESS = 7, 1 << 30  # tokens in front of a session's steps, and room behind them
_GATE_STEPS = 8  # steps whose experts are counted
_INDEPENDENT = (
    0.99  # of the experts that independent rows would have: what random routing must reach
)
_COLUMNS = (
    "context", "rows", "nodes", "step ms", "p99", "gpu ms", "p99", "gap us", "p99",
    "host us", "p99", "distinct", "GB", "TB/s", "% read",
)  # fmt: skip
_EXAMPLES = """\
columns:
  step      milliseconds from one launch to the next, everything included: median and p99; the
            host writes all of io, and launches when it has read the record
  gpu       the graph alone, between two events
  gap       microseconds that the GPU is idle between two graphs, by its own clock, of a session
            whose next step is queued before this one's record is read, as the engine does it:
            the GPU lays the step out itself, and here verifies as many drafts as fit its rows
  host      microseconds of that session's host from the end of a graph until it has queued the one
            behind the next; the GPU is busy meanwhile
  distinct  different experts a layer, of those that independent choices would give
  GB        weights, state and looked up rows that the step has to read
  % read    GB / step against a kernel that does nothing but read

examples, each after python -m ultraflash.tools.bench_decode:
  (nothing)                            the bundled tiny model, rows 1 to 8
  --checkpoint DIR --rows 1,6 --context 32k --steps 1000 --csv
  --config full --weights synthetic --world 8 --context 1k,8k,128k,1M --csv
                                       one of 8 ranks of the released model: the whole table
  --config full --weights synthetic --world 4 --rows 7 --routing overlap17 --ops
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV: steps of a width behind a context; world > 1: a shard step, emulated."""

    date: str
    commit: str
    gpu: str
    driver: str
    model: str
    weights: str
    world: int
    rank: int
    hop_us: float
    block: int
    rows: int
    context: int
    capacity: int
    routing: str
    steps: int
    nodes: int
    distinct: float
    distinct_expected: float
    step_p50_ms: float
    step_p99_ms: float
    gpu_p50_ms: float
    gpu_p99_ms: float
    gap_p50_us: float
    gap_p99_us: float
    host_p50_us: float
    host_p99_us: float
    read_gb: float
    tb_per_s: float
    read_tb_per_s: float  # of a kernel that only reads
    fraction: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a measurement, 1 with one sentence on stderr."""
    return gpu_arguments.run_tool(_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    if options.steps < 2:
        raise ConfigError(f"--steps must be at least 2, got {options.steps}")
    if options.routing != "random" and options.weights != "synthetic":
        raise ConfigError(f"--routing {options.routing} is steered by --weights synthetic")
    if min(options.context) < _FEWEST_STEPS * max(options.rows):
        raise ConfigError(f"--context {min(options.context)} is too short for steps of these rows")
    shard = open_shard(options, max(options.context))
    gpu_arguments.check_drafts(max(options.rows), shard.build.block, options.temperature)
    read = _read_tb_per_s(shard)
    print(f"{shard.title}; routing {options.routing}; reading memory: {read:.3f} TB/s")
    if shard.synthetic:
        shard.fill_state(shard.decode_runner(1).plan)
    table = csv_file(options.csv, shard.backend.device.name, "decode") if options.csv else None
    _print(*_COLUMNS)
    for row in _measured(shard, options, read):
        if table:  # at once: what is broken off has what it measured
            append(table, row)
        _print(
            row.context, row.rows, row.nodes, f"{row.step_p50_ms:.3f}", f"{row.step_p99_ms:.3f}",
            f"{row.gpu_p50_ms:.3f}", f"{row.gpu_p99_ms:.3f}", f"{row.gap_p50_us:.0f}",
            f"{row.gap_p99_us:.0f}", f"{row.host_p50_us:.1f}", f"{row.host_p99_us:.1f}",
            f"{row.distinct:.2f}/{row.distinct_expected:.2f}",
            f"{row.read_gb:.3f}", f"{row.tb_per_s:.3f}", f"{100 * row.fraction:.1f}",
        )  # fmt: skip
        independent = shard.synthetic and options.routing == "random"
        if independent and row.distinct < _INDEPENDENT * row.distinct_expected:
            print(
                f"rows are not independent: fewer than {_INDEPENDENT:.0%} of the experts expected"
            )
    plans = [shard.decode_runner(n).plan for n in options.rows]
    predicted, taken = shard.memory(plans)
    print(
        f"memory: {predicted:,} bytes predicted (weights, state, scratch, io, "
        f"room for state that moves), {taken:,} taken "
        f"({100 * (taken / predicted - 1):+.2f} %)"
    )
    if options.ops:
        _print_ops(shard, options)
    if table:
        print(f"rows appended to {table}")


def _print(*figures: object) -> None:
    print(" ".join(f"{figure:>9}" for figure in figures), flush=True)


def _read_tb_per_s(shard: Shard) -> float:
    from ultraflash.tools.op_timer import OpTimer

    return OpTimer(shard.device, shard.config.cache_dir).read_gb_per_s() / 1e3


def _measured(shard: Shard, options: argparse.Namespace, read: float) -> Iterator[Row]:
    device, version, day = shard.device, commit(), today()
    for rows in options.rows:
        runner = shard.decode_runner(rows)
        distinct = _distinct(shard, runner, options)
        for context in options.context:
            parts = list(_steps(shard, rows, context, options))
            warm, timed = parts[: options.warm], parts[options.warm :]
            _loop(runner, warm, options.seconds)
            loop = _loop(runner, timed, options.seconds)
            gpu = _gpu_ms(runner, shard.backend, timed[: len(loop) + 1])
            gap, host = _ahead_us(shard, rows, context, options)
            needed = bytes_to_read(_plan_of(shard, rows, context), distinct)
            speed = needed / _percentile(loop, 50) / 1e9
            yield Row(
                date=day,
                commit=version,
                gpu=device.name,
                driver=driver(device.driver),
                model=shard.name,
                weights=options.weights,
                world=shard.build.world,
                rank=shard.rank,
                hop_us=shard.hop_us,
                block=shard.build.block,
                rows=rows,
                context=context,
                capacity=shard.build.capacity.max_seq,
                routing=options.routing,
                steps=len(loop) + 1,
                nodes=runner.nodes,
                distinct=round(distinct.backbone, 3),
                distinct_expected=round(distinct.expected, 3),
                step_p50_ms=_percentile(loop, 50),
                step_p99_ms=_percentile(loop, 99),
                gpu_p50_ms=_percentile(gpu, 50),
                gpu_p99_ms=_percentile(gpu, 99),
                gap_p50_us=_percentile(gap, 50),
                gap_p99_us=_percentile(gap, 99),
                host_p50_us=_percentile(host, 50),
                host_p99_us=_percentile(host, 99),
                read_gb=round(needed / 1e9, 6),
                tb_per_s=round(speed, 4),
                read_tb_per_s=round(read, 4),
                fraction=round(speed / read, 4),
            )


def _plan_of(shard: Shard, rows: int, context: int) -> Plan:
    """What the step would be with no more room than the context: its costs count all entries."""
    capacity = Capacity(shard.build.capacity.slots, context)
    return build_decode(replace(shard.build, capacity=capacity), rows, 1)


def _distinct(shard: Shard, runner: CudaRunner, options: argparse.Namespace) -> Distinct:
    rng = np.random.default_rng(1)
    rows = runner.plan.rows
    ids = [tokens(shard.model, options.routing, rows, rng) for _ in range(_GATE_STEPS)]
    start = min(options.context) - rows
    return measured_distinct(runner, shard.model, SLOT, start, ids)


def _steps(shard: Shard, rows: int, context: int, options: argparse.Namespace) -> Iterator[Part]:
    """Rows that follow one another up to the end of the context, over and over."""
    rng = np.random.default_rng(0)
    span = max(min(_SPAN, context // 2) // rows, 1)
    for number in range(options.warm + options.steps):
        ids = tokens(shard.model, options.routing, rows, rng)
        draw = Draw(options.temperature, 0.95 if options.temperature else 1.0, seed=1, step=number)
        yield Part(SLOT, context - (span - number % span) * rows, ids, draw)


def _loop(runner: CudaRunner, steps: Sequence[Part], seconds: float) -> list[float]:
    """Milliseconds of every step but the first, from launch to launch; no new ones after a time."""
    launched: list[float] = []
    for part in steps:
        if len(launched) > 1 and launched[-1] - launched[0] > seconds:
            break
        write_step(runner, [part])
        runner.launch()
        launched.append(time.perf_counter())
        runner.wait()
        for name in _READ:
            if name in runner.plan.buffers:
                runner.read(name).tolist()
    return [1e3 * (after - before) for before, after in pairwise(launched)]


def _ahead_us(
    shard: Shard, rows: int, context: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """A session of the engine that runs ahead: how long the device is idle between two graphs, and
    the host's part of a step. Its tokens are its own: no routing. It has no more rows than drafts
    give it.
    """
    rows = min(rows, 1 + shard.build.block)
    steps = min(max(options.steps, _FEWEST_STEPS), max(_SPAN // rows, 1), (context - 1) // rows - 1)
    ids = (_ID,) * (context - (steps + 1) * rows)
    how = Sampling(options.temperature, 0.95 if options.temperature else 1.0, seed=1)
    request = Generation(ids, _ENDLESS, how, ignore_eos=True)
    session = Session.start("bench", request, SLOT, shard.model.eos, _ENDLESS)
    session.done, block = len(ids) - 1, shard.build.block
    session.drafts, session.confidence = (_ID,) * block, (0.0,) * block
    stream, runner = shard.backend.stream, shard.decode_runner(rows)
    rule = Rule.everything(block, rows, 1)
    times, host = [], []
    for _ in range(steps):
        seen_ns = stream.ended_ns
        (result,) = shard.plans.decode([session.verify()], rule, ahead=rows)
        host.append(1e-3 * (stream.launched_ns - seen_ns))
        times.append(runner.times_ns)
        session.advance(result)
        session.take(result)
    shard.plans.settle()
    # The first step follows from nothing, the second is the first one that does, and behind it the
    # graph of the record's other place is captured.
    idle = [1e-3 * (after[0] - before[1]) for before, after in pairwise(times[2:])]
    return idle, host[3:]


def _gpu_ms(runner: CudaRunner, backend: CudaBackend, steps: Sequence[Part]) -> list[float]:
    """Of each graph alone."""
    from ultraflash.runtime.gpu.driver import Event

    before, after, times = Event(), Event(), []
    for part in steps:
        write_step(runner, [part])
        before.record(backend.stream)
        runner.launch()
        after.record(backend.stream)
        backend.stream.wait()
        times.append(after.since(before))
    return times


def _percentile(values: Sequence[float], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 4)


def _print_ops(shard: Shard, options: argparse.Namespace) -> None:
    """Where the time of the widest step behind the longest context goes."""
    rows, context = max(options.rows), max(options.context)
    runner = shard.decode_runner(rows)
    write_step(runner, [next(_steps(shard, rows, context, options))])
    print(f"by operation, {rows} rows at {context:,}, {shard.title}:")
    for line in share_lines(by_op(runner.plan, node_us(runner, shard.backend.stream, 5))):
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = gpu_arguments.tool_parser("bench_decode", __doc__, _EXAMPLES)
    add_arguments(parser)
    gpu_arguments.add_rows(parser, "1..8")
    add = parser.add_argument
    add(
        "--context",
        type=positions,
        default=(1024,),
        metavar="N,...",
        help="tokens in front of the steps: 1000, or 1k,8k,128k,1M (default: 1k); the longest is "
        "what a slot holds",
    )
    add("--routing", choices=ROUTINGS, default="random", help="which experts rows choose (random)")
    add("--steps", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--seconds", type=float, default=1.0, metavar="S", help="or for so long (%(default)s)")
    add("--warm", type=int, default=5, metavar="N", help="steps that are not timed (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    add("--ops", action="store_true", help="also the time by operation, widest step and context")
    gpu_arguments.add_csv(parser, "decode")
    return parser


if __name__ == "__main__":
    sys.exit(main())
