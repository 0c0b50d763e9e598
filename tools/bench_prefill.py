"""Time chunks of a prompt on one GPU, by rows and by how much stands in front of them.

Each chunk size has its graph, captured before the clock starts; state in front of a chunk is filled
with random codes instead of being computed. A chunk's tokens per second are what a long prompt
would reach there; the last chunk's head and drafts, and the replay of ced20 and ced21, are timed
apart. With --weights synthetic one GPU is one rank of a world: a shard step, emulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ultraflash.graphs.ced import MODES, build_encode, build_replay
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.runtime.errors import ConfigError, DeviceError
from ultraflash.runtime.step_io import Draw, Part, write_step
from ultraflash.tools import gpu_arguments
from ultraflash.tools.op_shares import by_op, node_us, share_lines
from ultraflash.tools.routing import tokens
from ultraflash.tools.shard import (
    SLOT,
    Shard,
    add_arguments,
    open_shard,
    positions,
)
from ultraflash.tools.speed_table import append, commit, csv_file, driver, today

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.runner import CudaRunner

_SLOW_MS = 500.0  # a chunk that takes longer is timed once
_COLUMNS = ("context", "rows", "plan", "nodes", "ms", "best", "tokens/s", "TFLOP/s", "scratch MB")
_EXAMPLES = """\
plans: part = a chunk that is not the prompt's last, end = the last one with head and drafts;
encode and replay are the two halves of ced20 and ced21.

examples, each after python -m ultraflash.tools.bench_prefill:
  (nothing)                            the bundled tiny model
  --config full --weights synthetic --world 8 --context 8k,128k,1M --csv
                                       one of 8 ranks of the released model: the whole table
  --config full --weights synthetic --world 4 --chunks 1024 --prefill ced20 --ops
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV: a chunk behind a context. World > 1: a shard step, emulated."""

    date: str
    commit: str
    gpu: str
    driver: str
    model: str
    weights: str
    world: int
    rank: int
    hop_us: float
    prefill: str
    plan: str
    chunk: int
    context: int
    capacity: int
    nodes: int
    repeats: int
    ms: float
    best_ms: float
    tokens_per_s: float
    tflop_per_s: float
    scratch_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a measurement, 1 with one sentence on stderr."""
    return gpu_arguments.run_tool(_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    chunks = tuple(sorted(options.chunks))
    if chunks[-1] > min(options.context):
        raise ConfigError(
            f"a chunk of {chunks[-1]} rows does not fit into --context {min(options.context)}"
        )
    shard = open_shard(options, max(options.context), options.prefill)
    print(f"{shard.title}; prefill {options.prefill}, slots of {max(options.context):,} tokens")
    table = csv_file(options.csv, shard.backend.device.name, "prefill") if options.csv else None
    _print(*_COLUMNS)
    for row in _measured(shard, chunks, options):
        if table:  # at once: what is broken off has what it measured
            append(table, row)
        _print(
            row.context, row.chunk, row.plan, row.nodes, f"{row.ms:.3f}", f"{row.best_ms:.3f}",
            f"{row.tokens_per_s:,.0f}", f"{row.tflop_per_s:.2f}", row.scratch_bytes >> 20,
        )  # fmt: skip
    if table:
        print(f"rows appended to {table}")


def _print(*figures: object) -> None:
    print(" ".join(f"{figure:>10}" for figure in figures), flush=True)


def _runners(shard: Shard, chunk: int, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(plan, rows) that a chunk size has in this mode, the replay with the largest chunk."""
    if options.prefill == "full":
        yield "part", chunk
        if options.ends:
            yield "end", chunk
        return
    yield "encode", chunk
    if chunk == max(options.chunks):
        yield "replay", shard.config.tail


def _plan(shard: Shard, plan: str, rows: int) -> Plan:
    mode, tail = shard.config.prefill, shard.config.tail
    if plan == "replay":
        return build_replay(shard.build, mode, tail)
    if plan == "encode":
        return build_encode(shard.build, mode, tail, rows)
    return build_prefill(shard.build, rows, ends=plan == "end")


def _measured(shard: Shard, chunks: Sequence[int], options: argparse.Namespace) -> Iterator[Row]:
    version = commit()  # before rows are appended to a file of the checkout
    for chunk in chunks:
        for plan, rows in _runners(shard, chunk, options):
            try:
                runner = shard.compile(_plan(shard, plan, rows))
            except DeviceError as error:  # of the largest chunks behind the longest contexts
                print(f"{plan} of {rows} rows: {error}", flush=True)
                continue
            if shard.synthetic:
                shard.fill_state(runner.plan)
            for context in options.context:
                yield _measure(shard, runner, plan, context, options, version)
            runner.close()


def _measure(
    shard: Shard, runner: CudaRunner, plan: str, context: int, options: argparse.Namespace,
    version: str,
) -> Row:  # fmt: skip
    device, rows = shard.device, runner.plan.rows
    start = context - rows
    ids = tokens(shard.model, "random", rows, np.random.default_rng(0))
    window = start if plan == "replay" else 0
    write_step(runner, [Part(SLOT, start, ids, Draw(), window_start=window)])
    times = _times(shard, runner, options.repeats)
    median = float(np.median(times))
    if options.ops:
        print(f"by operation, {plan} of {rows} rows at {context:,}, {shard.title}:")
        replays = 1 if median > _SLOW_MS else 3
        shares = by_op(runner.plan, node_us(runner, shard.backend.stream, replays))
        print("\n".join(share_lines(shares)), flush=True)
    return Row(
        date=today(),
        commit=version,
        gpu=device.name,
        driver=driver(device.driver),
        model=shard.name,
        weights=options.weights,
        world=shard.build.world,
        rank=shard.rank,
        hop_us=shard.hop_us,
        prefill=options.prefill,
        plan=plan,
        chunk=rows,
        context=context,
        capacity=shard.build.capacity.max_seq,
        nodes=runner.nodes,
        repeats=len(times),
        ms=round(median, 4),
        best_ms=round(min(times), 4),
        tokens_per_s=round(1e3 * rows / median, 1),
        tflop_per_s=round(runner.plan.cost().flops / median / 1e9, 3),
        scratch_bytes=runner.arena.size,
    )


def _times(shard: Shard, runner: CudaRunner, repeats: int) -> list[float]:
    """Milliseconds of each replay behind one that warms up."""
    from ultraflash.runtime.gpu.driver import Event

    before, after, times = Event(), Event(), list[float]()
    stream = shard.backend.stream
    while len(times) <= repeats:
        before.record(stream)
        runner.launch()
        after.record(stream)
        stream.wait()
        times.append(after.since(before))
        if len(times) > 1 and times[-1] > _SLOW_MS:
            break
    return times[1:]


def _chunks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 16,128,1024,4096")
    return tuple(int(part) for part in parts)


def _parser() -> argparse.ArgumentParser:
    parser = gpu_arguments.tool_parser("bench_prefill", __doc__, _EXAMPLES)
    add_arguments(parser)
    add = parser.add_argument
    add(
        "--chunks",
        type=_chunks,
        default=(16, 128, 1024, 4096),
        metavar="N,...",
        help="rows of a chunk (default: 16,128,1024,4096)",
    )
    add(
        "--context",
        type=positions,
        default=(8192,),
        metavar="N,...",
        help="where a chunk ends: 8k,128k,1M (default: 8k); the longest is what a slot holds",
    )
    add("--prefill", choices=MODES, default="full", help="what the decoder sees (default: full)")
    add("--ends", action="store_true", help="also each chunk as a prompt's last one")
    add("--repeats", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--ops", action="store_true", help="also the time by operation of each row")
    gpu_arguments.add_csv(parser, "prefill")
    return parser


if __name__ == "__main__":
    sys.exit(main())
