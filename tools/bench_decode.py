"""Time decode steps on one GPU as the engine's loop pays them: write io, launch, wait, read.

Every width has its graph, captured before the clock starts. Tokens are random and nothing is
verified: a step takes the same time whatever it says. Beside the step's own time stand what the GPU
needs for the graph alone, launched back to back, and what the host needs between two graphs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.step import Build
from ultraflash.runtime.backends import cuda_backend
from ultraflash.runtime.config import prepare_cache_dir
from ultraflash.runtime.errors import ConfigError, EngineError
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.tools import gpu_arguments
from ultraflash.tools.speed_table import append, commit, gpu_csv, today

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend
    from ultraflash.runtime.gpu.runner import CudaRunner

_SLOT = 1
_BACK_TO_BACK = 20
_READ = ("io.accepted", "io.token", "io.drafts", "io.confidence")
_COLUMNS = ("step p50", "p99", "gpu", "host p50", "p99", "gap p50", "p99")
_EXAMPLES = """\
columns, in microseconds:
  step      from one launch to the next, everything included
  gpu       the graph alone: median of launches that do not wait for one another
  host      from the end of a graph, as the host sees it, until the next one is launched
  gap       step minus gpu: how long the GPU waits for the host

examples, each after python -m ultraflash.tools.bench_decode:
  (nothing)                            the bundled tiny model, rows 1 to 8
  --checkpoint DIR --rows 1,6 --length 32000 --steps 1000 --csv
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV: steps of one width. Times in microseconds."""

    date: str
    commit: str
    gpu: str
    driver: str
    checkpoint: str
    block: int
    rows: int
    length: int
    steps: int
    nodes: int
    step_p50_us: float
    step_p99_us: float
    gpu_us: float
    host_p50_us: float
    host_p99_us: float
    gap_p50_us: float
    gap_p99_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a measurement, 1 with one sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (EngineError, GraphError, OSError) as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    config = gpu_arguments.settings(options)
    build = gpu_arguments.chosen_build(options, config)
    if options.steps < 2:
        raise ConfigError(f"--steps must be at least 2, got {options.steps}")
    if options.length + max(options.rows) > build.capacity.max_seq:
        raise ConfigError(
            f"--length {options.length} and {max(options.rows)} rows do not fit into a context of "
            f"{build.capacity.max_seq}"
        )
    gpu_arguments.check_drafts(max(options.rows), build.block, options.temperature)
    backend_class = cuda_backend()
    prepare_cache_dir(config)
    index = CheckpointIndex.open(config.checkpoint)
    backend = backend_class.open(replace(config, eager=False, check=False), index, build.model)
    rows = []
    print(f"{backend.device.name}; {config.checkpoint.name}, block {build.block}, us")
    print(_line("rows", "nodes", *_COLUMNS))
    for row in _measured(backend, build, options, config.checkpoint.name):
        rows.append(row)
        print(
            _line(
                row.rows,
                row.nodes,
                row.step_p50_us,
                row.step_p99_us,
                row.gpu_us,
                row.host_p50_us,
                row.host_p99_us,
                row.gap_p50_us,
                row.gap_p99_us,
            ),
            flush=True,
        )
    if options.csv:
        path = options.csv if isinstance(options.csv, Path) else gpu_csv(rows[0].gpu, "decode")
        for row in rows:
            append(path, row)
        print(f"{len(rows)} rows appended to {path}")


def _line(*figures: object) -> str:
    return " ".join(f"{figure:>9}" for figure in figures)


def _measured(
    backend: CudaBackend, build: Build, options: argparse.Namespace, name: str
) -> Iterator[Row]:
    device, version, day = backend.device, commit(), today()
    for rows in options.rows:
        runner = backend.compile(build_decode(build, rows, 1))
        write_constants(runner)
        steps = list(_steps(build, rows, options))
        _loop(runner, backend, steps[: options.warm])
        loop = _loop(runner, backend, steps[options.warm :])
        gpu = _gpu_us(runner, backend)
        gap = [step - gpu for step in loop.step]
        yield Row(
            date=day,
            commit=version,
            gpu=device.name,
            driver=f"{device.driver // 1000}.{device.driver % 1000 // 10}",
            checkpoint=name,
            block=build.block,
            rows=rows,
            length=options.length,
            steps=options.steps,
            nodes=runner.nodes,
            step_p50_us=_percentile(loop.step, 50),
            step_p99_us=_percentile(loop.step, 99),
            gpu_us=round(gpu, 1),
            host_p50_us=_percentile(loop.host, 50),
            host_p99_us=_percentile(loop.host, 99),
            gap_p50_us=_percentile(gap, 50),
            gap_p99_us=_percentile(gap, 99),
        )


def _steps(build: Build, rows: int, options: argparse.Namespace) -> Iterator[Part]:
    """Rows that follow one another from `--length` on, and begin there again at the limit."""
    rng = np.random.default_rng(0)
    room = build.capacity.max_seq - options.length - rows + 1
    for number in range(options.warm + options.steps):
        ids = rng.integers(3, build.model.vocab, rows).tolist()
        draw = Draw(options.temperature, 0.95 if options.temperature else 1.0, seed=1, step=number)
        yield Part(_SLOT, options.length + number * rows % room, ids, draw)


@dataclass(frozen=True)
class _Loop:
    """Microseconds of every step, and of the host's part between two graphs."""

    step: list[float]
    host: list[float]


def _loop(runner: CudaRunner, backend: CudaBackend, steps: Sequence[Part]) -> _Loop:
    launched, ended = [], []
    for part in steps:
        write_step(runner, [part])
        runner.launch()
        launched.append(time.perf_counter())
        backend.stream.wait()
        ended.append(time.perf_counter())
        for name in _READ:
            if name in runner.plan.buffers:
                runner.read(name).tolist()
    return _Loop(
        [1e6 * (after - before) for before, after in pairwise(launched)],
        [1e6 * (start - end) for end, start in zip(ended, launched[1:], strict=False)],
    )


def _gpu_us(runner: CudaRunner, backend: CudaBackend) -> float:
    """Of one graph, when the next is queued already."""
    from ultraflash.runtime.gpu.driver import Event

    times = []
    for _ in range(5):
        before, after = Event(), Event()
        before.record(backend.stream)
        for _ in range(_BACK_TO_BACK):
            runner.launch()
        after.record(backend.stream)
        backend.stream.wait()
        times.append(1e3 * after.since(before) / _BACK_TO_BACK)
    return float(np.median(times))


def _percentile(values: Sequence[float], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.bench_decode",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gpu_arguments.add_checkpoint(parser, release=False)
    gpu_arguments.add_rows(parser, "1..8")
    parser.add_argument(
        "--length",
        type=int,
        default=1000,
        metavar="N",
        help="tokens before the steps (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--warm", type=int, default=20, metavar="N", help="steps that are not timed (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy"
    )
    parser.add_argument(
        "--csv",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help="append rows (default file: tools/speed/<gpu>_decode.csv)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
