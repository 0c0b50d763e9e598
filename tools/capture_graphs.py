"""Compile every kernel that a server will need, and on a GPU capture and launch every graph once.

The precompile step: kernels go into the cache that the server reads (UF_CACHE_DIR), so that it
starts without compiling. With --compile-only neither a GPU nor a driver is needed, and the models'
weights never are: kernels depend on the types of buffers, not on sizes. Give it the server's
switches, and with --rows and --sequences what the server may have of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ultraflash.graphs.plan import Op, Plan, Ref
from ultraflash.graphs.step import Build
from ultraflash.ptx import ARCHITECTURES
from ultraflash.runtime.backends import cuda_backend
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.errors import CompileError, ConfigError, DeviceError
from ultraflash.runtime.plans import served
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.tools import gpu_arguments

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend
    from ultraflash.runtime.gpu.nvrtc import Kernel, Unit
    from ultraflash.runtime.gpu.runner import CudaRunner

_EXAMPLES = """\
examples, each after python -m ultraflash.tools.capture_graphs:
  --compile-only                       every kernel for sm_90a, sm_100a and sm_103a, on any machine
  --compile-only --release --arch sm_100a
                                       the same plans for the full-size model: equal kernels
  --checkpoint DIR                     on a GPU: compile for it, capture and launch each graph
  --checkpoint DIR --rows 4 --sequences 1..4
                                       graphs of four rows for up to four conversations

A kernel stands once in the table for each combination of its buffers' types, as f32[3]: of three
axes. Where architectures differ, a cell has one value for each. Bytes of shared memory are those of
a CTA, static; of stack and spills those of a thread. Spills should be 0: they are what does not fit
into registers. Where the compiler says nothing of all this, a cell has a question mark.
"""
_REPLAYS = 20
_ID = 3  # of every token that is run: which one does not matter


@dataclass(frozen=True)
class Compiled:
    """A kernel and how long it took to make or to find."""

    unit: Unit
    kernel: Kernel
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when everything compiled (and ran), 1 when not, with what went wrong."""
    return gpu_arguments.run_tool(_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    config = gpu_arguments.settings(options)
    build = gpu_arguments.chosen_build(options, config, options.world)
    plans = replace(served(config), rows=options.rows, sequences=options.sequences).plans
    backend_class = cuda_backend()
    cache = prepare_cache_dir(config)
    if options.compile_only:
        compile_all(plans(build), options.arch or ARCHITECTURES, cache, options, console)
        return
    if options.release or options.world != 1:
        raise ConfigError(
            "--release and --world name no weights to capture graphs with: add --compile-only"
        )
    arch = _own_arch(config.gpus[0])
    if options.arch and options.arch != (arch,):
        raise ConfigError(
            f"--arch {','.join(options.arch)}: graphs run on this GPU's {arch} alone, "
            f"others can be had with --compile-only"
        )
    compile_all(plans(build), (arch,), cache, options, console)
    index = CheckpointIndex.open(config.checkpoint)
    backend = backend_class.open(replace(config, eager=False, check=False), index, build.model)
    capture_all(plans(build), backend, build, config, console)


def _own_arch(ordinal: int) -> str:
    from ultraflash.runtime.gpu.driver import Device

    try:
        return Device.open(ordinal).arch
    except DeviceError as error:
        raise DeviceError(f"{error}; --compile-only needs no GPU") from error


def compile_all(
    plans: Iterable[Plan],
    archs: Sequence[str],
    cache: Path,
    options: argparse.Namespace,
    console: Console,
) -> list[Compiled]:
    """Compile what the plans and a server's start need, then find it again, and print a table and
    both times.

    Raises:
        CompileError: for the first kernel that does not compile, after all others are done.
    """
    from ultraflash.runtime.gpu.backend import other_units
    from ultraflash.runtime.gpu.nvrtc import Unit

    ops: dict[Unit, Op | None] = {
        Unit.of_node(node): node.op for plan in plans for node in plan.nodes
    }
    ops |= other_units()
    wanted = [(unit, arch) for unit in ops for arch in archs]
    started = time.perf_counter()
    done = list(_compiled(wanted, cache, options.threads))
    made = time.perf_counter()
    again = list(_compiled(wanted, cache, options.threads))  # as a server that starts next
    found = time.perf_counter()
    console.print(_kernel_table(ops, done, archs))
    fresh = sum(not item.kernel.cached for item in done)
    warm = f"all again from there in {found - made:.2f} s"
    if lost := sum(not item.kernel.cached for item in again):
        warm = f"{lost} were not there again"
    console.print(
        f"{len(done)} kernels for {', '.join(archs)}: {fresh} compiled, {len(done) - fresh} from "
        f"{cache / 'cubin'}, in {made - started:.1f} s with {options.threads} threads; {warm}"
    )
    return done


def _compiled(wanted: Sequence[tuple[Unit, str]], cache: Path, threads: int) -> Iterator[Compiled]:
    from ultraflash.runtime.gpu.nvrtc import compile_unit

    def one(unit: Unit, arch: str) -> Compiled:
        started = time.perf_counter()
        kernel = compile_unit(unit, arch, cache)
        return Compiled(unit, kernel, time.perf_counter() - started)

    failed: list[CompileError] = []
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(threads) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=len(wanted), now="")
        for future in as_completed([pool.submit(one, *item) for item in wanted]):
            try:
                item = future.result()
            except CompileError as error:  # the others may have something to say as well
                failed.append(error)
                continue
            bar.update(task, advance=1, now=f"{item.unit.stem} {item.kernel.arch}")
            yield item
    if failed:
        raise failed[0]


def _kernel_table(
    ops: dict[Unit, Op | None], done: Sequence[Compiled], archs: Sequence[str]
) -> Table:
    table = Table(
        title=f"kernels for {' / '.join(archs)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("its variant")
    for heading in ("registers", "shared", "stack", "spills", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    found = {(item.unit, item.kernel.arch): item for item in done}
    for unit, own in sorted(ops.items(), key=lambda item: item[0].stem):
        items = [found[unit, arch] for arch in archs]
        kernels = [item.kernel for item in items]
        variants = [op for other, op in ops.items() if other.stem == unit.stem and op]
        variant = [_difference(own, variants) if own else "", "beside" * unit.beside]
        seconds = sum(item.seconds for item in items if not item.kernel.cached)
        table.add_row(
            unit.stem,
            ", ".join(filter(None, variant)),
            *(_cell(column) for column in zip(*map(_figures, kernels), strict=True)),
            "cached" if all(kernel.cached for kernel in kernels) else f"{seconds:.2f}",
        )
    return table


def _figures(kernel: Kernel) -> tuple[object, ...]:
    """Registers, shared memory, stack and spills; a compiler that is silent has not said 0."""
    if kernel.silent:
        return ("?",) * 4
    return kernel.registers, kernel.shared_bytes, kernel.stack_bytes, kernel.spill_bytes


def _difference(op: Op, variants: Sequence[Op]) -> str:
    """As much of what a kernel is compiled for as it takes to tell its variants apart."""
    told: list[str] = []
    for name in _traits(op):
        longer = [*told, name]
        if _distinct(variants, longer) > _distinct(variants, told):
            told = longer
    return ", ".join(f"{name} {_traits(op)[name]}" for name in told)


def _distinct(variants: Sequence[Op], names: Sequence[str]) -> int:
    return len({tuple(_traits(op).get(name) for name in names) for op in variants})


def _traits(op: Op) -> dict[str, str]:
    """Types of buffers, and values that are compiled in."""
    types = {name: _kind(getattr(op, name)) for name in op.__dataclass_fields__}
    return types | {name.lower(): str(value) for name, value in op.variant().items()}


def _kind(value: object) -> str:
    """A buffer's type and number of axes; constants are no part of a kernel."""
    if isinstance(value, Ref):
        return f"{value.dtype}[{len(value.shape)}]"
    return "absent" if value is None else ""


def _cell(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else "/".join(texts)


def capture_all(
    plans: Iterable[Plan],
    backend: CudaBackend,
    build: Build,
    config: RuntimeConfig,
    console: Console,
) -> None:
    """Capture each plan, launch it, and print a table, and what the largest scratch holds."""
    from ultraflash.runtime.gpu.driver import memory

    columns = ("rows", "sequences", "nodes", "scratch MiB", "io KiB", "capture ms", "step ms")
    table = Table(
        title=f"graphs on {backend.device.name}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("plan", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    runners = [backend.compile(plan) for plan in plans]  # all, as of a server
    for runner in runners:
        plan = runner.plan
        capture_ms, step_ms = _launched(runner, backend, build)
        table.add_row(
            plan.name,
            str(plan.rows),
            str(plan.sequences),
            f"{runner.nodes:,}",
            f"{runner.arena.size / 2**20:.1f}",
            f"{runner.io_bytes / 2**10:.0f}",
            f"{capture_ms:.1f}",
            f"{step_ms:.3f}",
        )
    console.print(table)
    largest = max(runners, key=lambda runner: runner.arena.size)
    console.print(
        f"largest: {largest.plan.name}, {largest.plan.rows} rows, {largest.arena.report()}"
    )
    free, total = memory()
    console.print(
        f"{build.capacity.slots} slots of {build.capacity.max_seq:,} tokens, weights and graphs: "
        f"{(total - free) / 2**30:.2f} of {total / 2**30:.2f} GiB are taken; "
        f"step ms: median of {_REPLAYS} launches, each waited for"
    )


def _launched(runner: CudaRunner, backend: CudaBackend, build: Build) -> tuple[float, float]:
    """Milliseconds to capture and launch it first, and of a launch afterwards."""
    plan = runner.plan
    each, more = divmod(plan.rows, plan.sequences)
    start = min(128, build.capacity.max_seq - plan.rows)
    parts = [
        Part(number, start, [_ID] * (each + (number < more))) for number in range(plan.sequences)
    ]
    write_constants(runner)
    write_step(runner, parts)
    times = []
    for _ in range(_REPLAYS + 1):
        began = time.perf_counter()
        runner.launch()
        backend.stream.wait()
        times.append(1e3 * (time.perf_counter() - began))
    return times[0], statistics.median(times[1:])


def _parser() -> argparse.ArgumentParser:
    parser = gpu_arguments.tool_parser("capture_graphs", __doc__, _EXAMPLES)
    gpu_arguments.add_checkpoint(parser, release=True)
    gpu_arguments.add_rows(parser, "1..8")
    parser.add_argument(
        "--sequences",
        type=gpu_arguments.counts,
        default=tuple(range(1, RuntimeConfig.max_sequences + 1)),
        metavar="N..M",
        help="conversations that share a decode step "
        f"(default: 1..{RuntimeConfig.max_sequences}, as the server's)",
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="capture nothing: works without a GPU"
    )
    parser.add_argument(
        "--arch",
        type=gpu_arguments.architectures,
        metavar="A,B",
        help=f"default: {','.join(ARCHITECTURES)} with --compile-only, else the GPU's own",
    )
    parser.add_argument(
        "--world", type=int, default=1, metavar="N", help="kernels of one of N ranks (default: 1)"
    )
    threads = min(8, len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--threads",
        type=int,
        default=threads,
        metavar="N",
        help="compilers side by side (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
