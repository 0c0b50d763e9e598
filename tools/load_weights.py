"""Inspect, verify and pre-shard a checkpoint in the official layout.

Prints parameters, bytes and dtypes by group, and compares names, dtypes, shapes and sizes with what
config.json asks for, and the special ids with the tokenizer. --check reads every byte besides and
reports values that are no numbers. --world N tells what a rank would hold; with --shard OUT it is
written: a folder for each rank, in the stored formats, and one for the tables that all ranks map.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ultraflash.graphs.checkpoint import (
    DTYPE_BYTES,
    ENGRAM_TABLES,
    GROUPS,
    TensorSpec,
    expected_tensors,
    parameters,
    tensor_bytes,
)
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.runtime.errors import EngineError, WeightsError
from ultraflash.runtime.weights import (
    CheckpointIndex,
    build_token_map,
    check_special_ids,
    weight_table,
    weights_digest,
)
from ultraflash.runtime.weights.check import find_damage
from ultraflash.runtime.weights.index import SHARD_FILE
from ultraflash.runtime.weights.table import cut_specs, stored_slices
from ultraflash.runtime.weights.write import write_checkpoint

SHARD_BYTES = 5_000_000_000
COMMON = "common"
_COPIED = ("config.json", "inference/config.json", "tokenizer.json", "tokenizer_config.json")
_LINE_SECONDS = 5.0


def rank_folder(out: Path, rank: int, world: int) -> Path:
    """Where the shard of a rank is."""
    return out / f"rank-{rank}-of-{world}"


def group_table(specs: dict[str, TensorSpec], title: str) -> Table:
    """Tensors, parameters, bytes and dtypes by group, and their sums."""
    table = Table(title=title, title_justify="left")
    for heading, justify in (
        ("group", "left"),
        ("tensors", "right"),
        ("parameters", "right"),
        ("bytes", "right"),
        ("dtypes", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for group in GROUPS:
        members = [spec for spec in specs.values() if spec.group == group]
        if members:
            table.add_row(group, *_sums(members))
    table.add_section()
    table.add_row("total", *_sums(list(specs.values())))
    return table


def _sums(specs: list[TensorSpec]) -> tuple[str, str, str, str]:
    return (
        f"{len(specs):,}",
        f"{sum(map(parameters, specs)):,}",
        f"{sum(map(tensor_bytes, specs)):,}",
        " ".join(sorted({spec.dtype for spec in specs})),
    )


def inspect(folder: Path, console: Console) -> tuple[Model, CheckpointIndex]:
    """Print what is there, then verify it.

    Raises:
        WeightsError: naming everything that does not fit.
        ConfigError: when config.json is missing or incomplete.
    """
    model = Model.from_checkpoint(folder)
    index = CheckpointIndex.open(folder)
    expected = cut_specs(model, index.shard.world) if index.shard else expected_tensors(model)
    present = {
        name: TensorSpec(index.tensors[name].dtype, index.tensors[name].shape, spec.group)
        for name, spec in expected.items()
        if name in index.tensors and index.tensors[name].dtype in DTYPE_BYTES
    }
    console.print(group_table(present, str(folder)))
    index.verify(model)
    check_special_ids(folder / "tokenizer.json", model)
    build_token_map(folder / "tokenizer.json", model, None)
    console.print(
        f"all {len(present):,} tensors and the tokenizer are as config.json asks; "
        f"digest {weights_digest(index)}"
    )
    return model, index


def check(index: CheckpointIndex, console: Console) -> None:
    """Read every byte.

    Raises:
        WeightsError: naming every tensor that holds something else than numbers.
    """
    with meter(console, "checking", index.total_bytes) as advance:
        damage = find_damage(index, advance)
    if damage:
        raise WeightsError(
            f"{index.folder} is damaged, {len(damage)} tensors hold values that are no numbers; "
            "fetch their files again:\n" + "\n".join(f"  {line}" for line in damage)
        )
    console.print("every scale and every value is a number")


def plan_shards(model: Model, world: int) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """What each rank's folder holds, and what all ranks share.

    Engram tables are split by no axis and only ever mapped, so one copy serves all ranks.

    Raises:
        WorldError: when `world` does not divide the model.
        WeightsError: when a cut would not fall on the border of a group of scales.
    """
    model.check_world(world)
    specs = cut_specs(model, world)
    shared = {name: spec for name, spec in specs.items() if spec.group == ENGRAM_TABLES}
    return {name: spec for name, spec in specs.items() if name not in shared}, shared


def shard(
    model: Model,
    index: CheckpointIndex,
    world: int,
    out: Path,
    console: Console,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `out/rank-R-of-N` for each rank, and `out/common`.

    Raises:
        WorldError, WeightsError: when the model cannot be split so, the source is itself a shard,
            `out` holds something already, or the disk is too small.
    """
    if index.shard:
        raise WeightsError(f"{index.folder} is a shard itself: split the folder it was made from")
    own, shared = plan_shards(model, world)
    total = sum(map(tensor_bytes, own.values())) * world + sum(map(tensor_bytes, shared.values()))
    _prepare(out, total)
    source = weights_digest(index)
    with meter(console, "writing", total) as advance:
        if shared:
            (out / COMMON).mkdir()
            write_checkpoint(out / COMMON, shared, index.raw, shard_bytes, advance)
        for rank in range(world):
            folder = rank_folder(out, rank, world)
            folder.mkdir()
            _copy_small_files(index.folder, folder)
            write_checkpoint(
                folder, own, _rank_source(model, index, world, rank), shard_bytes, advance
            )
            value = {
                "world": world,
                "rank": rank,
                "source": source,
                "common": f"../{COMMON}" if shared else None,
            }
            (folder / SHARD_FILE).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _rank_source(
    model: Model, index: CheckpointIndex, world: int, rank: int
) -> Callable[[str], npt.NDArray[Any]]:
    cuts = {
        source: stored_slices(row, source, world, rank)
        for row in weight_table(model).values()
        for source in row.sources
    }
    return lambda name: index.raw(name)[cuts.get(name, ())]


def _prepare(out: Path, total: int) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        occupied = any(out.iterdir())
    except OSError as error:
        raise WeightsError(
            f"{out} cannot be written ({error.strerror}): choose another folder"
        ) from error
    if occupied:
        raise WeightsError(f"{out} is not empty: choose another folder or empty it")
    free = shutil.disk_usage(out).free
    if free < total:
        raise WeightsError(
            f"{out} needs {total:,} bytes but its disk has {free:,} free: choose another disk"
        )


def _copy_small_files(source: Path, target: Path) -> None:
    for name in _COPIED:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


@contextmanager
def meter(
    console: Console, what: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left on a terminal, a line every few seconds elsewhere."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda count: progress.advance(task, count)
        return

    started = last = clock()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = clock()
        if now - last >= _LINE_SECONDS:
            last, rate = now, done / (now - started)
            left = (total - done) / rate
            console.print(
                f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
                f"{left:.0f} s left"
            )

    yield advance
    seconds = max(clock() - started, 1e-9)
    console.print(f"{what}: {done:,} bytes in {seconds:.1f} s, {done / seconds / 1e9:.2f} GB/s")


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 when everything is as it should be, 1 when not, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.load_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of the checkpoint")
    parser.add_argument("--check", action="store_true", help="read every byte, too")
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--shard", type=Path, metavar="OUT", help="empty folder for the shards")
    options = parser.parse_args(arguments)
    if options.shard and options.world is None:
        parser.error("--shard needs --world N, the number of ranks to split for")
    # Files and pipes have no width; the default of 80 would break the names of groups.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)
    try:
        model, index = inspect(options.path, console)
        if options.check:
            check(index, console)
        if options.world is not None:
            own, _ = plan_shards(model, options.world)
            console.print(group_table(own, f"each rank of {options.world}, beside shared tables"))
        if options.shard:
            shard(model, index, options.world, options.shard, console)
            console.print(f"wrote {options.world} ranks into {options.shard}")
    except (EngineError, GraphError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or options.path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
