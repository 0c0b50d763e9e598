"""Time one operation's kernel at the shapes that a model's plans give it, on one GPU.

Only that operation's buffers are allocated and filled with plausible random codes, so that single
operations of the full-size model fit, whole or as one of several ranks. A time is that of one
launch in a CUDA graph of many; weights and state come from device memory, activations from the L2
cache. The same run measures how fast memory can be read at all, and what an empty launch takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ultraflash.graphs.capacity import MAX_ROWS
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build
from ultraflash.runtime.backends import cuda_backend
from ultraflash.runtime.config import prepare_cache_dir
from ultraflash.tools import gpu_arguments
from ultraflash.tools.op_cases import Case, cases
from ultraflash.tools.op_data import Setting
from ultraflash.tools.speed_table import append, commit, csv_file, driver, today

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.driver import Device
    from ultraflash.tools.op_timer import OpTimer

_CONTEXT, _MOST_ROWS = 65_536, 16_384
_EXAMPLES = f"""\
OP is the name of a file in graphs/ops/, or all. A decode step has it at several shapes: a line for
each, with the first node that has it and how many more do (nodes). More rows than a decode step
can have are a chunk of a prompt.

examples, each after python -m ultraflash.tools.bench_op:
  linear --release --rows 1..8         every matrix product of the full-size model
  experts_up --release --world 8 --rows 1,7
                                       what one of 8 GPUs does of it
  experts_down --release --world 4 --rows 128,1024,4096
                                       in chunks of a prompt
  attention --release --context {_CONTEXT}   with a conversation of that many tokens
  all --release --rows 7 --csv         every kernel; rows are appended to tools/speed/<gpu>.csv

MB is what must be moved at least: weights, the state that is touched, inputs and outputs, once.
"% of read" compares MB/us with reading memory and doing nothing else. ms/step is us times nodes.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the CSV: an operation at one shape. Times are medians over replays of a graph."""

    date: str
    commit: str
    gpu: str
    driver: str
    model: str
    world: int
    rows: int
    context: int
    op: str
    node: str
    nodes: int
    shapes: str
    registers: int
    copies: int  # of weights and state, in rotation
    us: float
    best_us: float
    nbytes: int
    gb_per_s: float
    read_gb_per_s: float
    percent_of_read: float
    floor_us: float  # of a kernel that does nothing


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a measurement, 1 with one sentence on stderr."""
    return gpu_arguments.run_tool(_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    config = gpu_arguments.settings(options)
    build = gpu_arguments.chosen_build(options, config, options.world)
    if options.context is None:  # every slot of a million tokens would be in every copy of state
        capacity = replace(build.capacity, max_seq=min(_CONTEXT, build.model.max_position))
        build = replace(build, capacity=capacity)
    build = replace(build, capacity=replace(build.capacity, slots=1))
    # Whatever is wrong with the request is said before a GPU is looked for.
    wanted = {rows: cases(_plan(build, rows), options.op) for rows in options.rows}
    cuda_backend()
    from ultraflash.runtime.gpu.driver import Device
    from ultraflash.tools.op_timer import OpTimer

    device = Device.open(config.gpus[0])
    timer = OpTimer(device, prepare_cache_dir(config))
    model = "release" if options.release else config.checkpoint.name
    rows = list(_measured(timer, device, wanted, build, options, model))
    for line in _lines(rows):
        print(line)
    if options.csv:
        path = csv_file(options.csv, device.name)
        for row in rows:
            append(path, row)
        print(f"{len(rows)} rows appended to {path}")


def _plan(build: Build, rows: int) -> Plan:
    """A decode step, or as many rows of a prompt."""
    if rows <= MAX_ROWS:
        return build_decode(build, rows, 1)
    return build_prefill(build, rows, ends=False)


def _measured(
    timer: OpTimer,
    device: Device,
    wanted: dict[int, list[Case]],
    build: Build,
    options: argparse.Namespace,
    model: str,
) -> Iterator[Row]:
    context = build.capacity.max_seq
    setting = Setting(context, options.temperature, options.top_p, options.top_k)
    read, floor = timer.read_gb_per_s(), timer.floor_us()
    version, day = commit(), today()
    for rows, found in wanted.items():
        for case in found:
            timing = timer.time(case.op, setting)
            nbytes = case.op.cost().nbytes
            speed = nbytes / timing.us / 1e3
            yield Row(
                date=day,
                commit=version,
                gpu=device.name,
                driver=driver(device.driver),
                model=model,
                world=build.world,
                rows=rows,
                context=context,
                op=case.op.stem(),
                node=case.label,
                nodes=case.count,
                shapes=case.shapes,
                registers=timing.kernel.registers,
                copies=timing.copies,
                us=round(timing.us, 3),
                best_us=round(timing.best_us, 3),
                nbytes=nbytes,
                gb_per_s=round(speed, 1),
                read_gb_per_s=round(read, 1),
                percent_of_read=round(100 * speed / read, 1),
                floor_us=round(floor, 3),
            )


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """A table in plain text: long names may run over their column, nothing is cut."""
    first = rows[0]
    yield (
        f"{first.gpu}, driver {first.driver}; {first.model}, world {first.world}, "
        f"context {first.context:,}"
    )
    yield _line("rows", "node", "shapes", "nodes", "us", "MB", "GB/s", "% of read", "ms/step")
    for row in rows:
        yield _line(
            row.rows,
            row.node,
            row.shapes,
            row.nodes,
            f"{row.us:.2f}",
            f"{row.nbytes / 1e6:.3f}",
            f"{row.gb_per_s:.0f}",
            f"{row.percent_of_read:.1f}",
            f"{row.us * row.nodes / 1e3:.3f}",
        )
    yield _summary(rows)


def _line(rows: object, node: str, shapes: str, *figures: object) -> str:
    widths = (5, 9, 10, 6, 9, 8)
    right = " ".join(f"{figure:>{width}}" for figure, width in zip(figures, widths, strict=True))
    return f"{rows:>4} {node:26} {shapes:32} {right}"


def _summary(rows: Sequence[Row]) -> str:
    steps = {
        count: sum(row.us * row.nodes for row in rows if row.rows == count) / 1e3
        for count in dict.fromkeys(row.rows for row in rows)
    }
    of_steps = ", ".join(f"{ms:.3f} ms at {count} rows" for count, ms in steps.items())
    return (
        f"of a step: {of_steps}; reading memory: {rows[0].read_gb_per_s:,.0f} GB/s; "
        f"an empty launch: {rows[0].floor_us:.2f} us"
    )


def _parser() -> argparse.ArgumentParser:
    parser = gpu_arguments.tool_parser("bench_op", __doc__, _EXAMPLES)
    parser.add_argument("op", metavar="OP", help="an operation, or all")
    gpu_arguments.add_checkpoint(parser, release=True)
    gpu_arguments.add_rows(parser, "1,4,8", _MOST_ROWS, f"; above {MAX_ROWS} a chunk of a prompt")
    parser.add_argument(
        "--world", type=int, default=1, metavar="W", help="shapes of one of W ranks (default: 1)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="of accept and draft_sample"
    )
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="of the same")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of the same, 0 = off")
    gpu_arguments.add_csv(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
