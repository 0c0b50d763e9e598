"""From mapped files to the arrays that a backend computes with.

`load_weights` makes the NumPy backend's form: matrices of linears float64 (the interpreter sums in
float64), everything else float32, all exact. Engram tables stay on disk, mapped: they are never
decoded as a whole, only the rows that are looked up.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.checkpoint import VISION, expected_tensors, tensor_bytes
from ultraflash.graphs.engram import engram_hashes
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import U8
from ultraflash.graphs.rotary import frequencies
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.formats import check_scales, dequantise
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.table import (
    TOKEN_MAP,
    Row,
    shard_range,
    stored_slices,
    weight_table,
)
from ultraflash.runtime.weights.token_map import build_token_map

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_SCAN_ROWS = 1 << 20


@dataclass(frozen=True)
class MappedRows:
    """A table that stays on disk. Shapes: codes u1 [R, dim] E4M3, scales u1 [R, dim/32] E8M0."""

    codes: U8
    scales: U8

    @property
    def shape(self) -> tuple[int, ...]:
        """[R, dim], as a matrix would say."""
        return self.codes.shape


class Weights:
    """The loaded weights of all ranks of a world."""

    def __init__(self, world: int, held: dict[str, list[Any]]) -> None:
        """Take what `load_weights` made: for each name one array, or one for each rank."""
        self.world = world
        self._held = held

    @property
    def names(self) -> tuple[str, ...]:
        """What was loaded."""
        return tuple(self._held)

    def host(self, name: str, rank: int = 0) -> Any:
        """A rank's part: float64, float32 or int64 array (read-only, C order), or `MappedRows`.

        Raises:
            WeightsError: when that name was not loaded or there is no such rank.
        """
        if name not in self._held:
            raise WeightsError(f"weight {name} was not loaded")
        if not 0 <= rank < self.world:
            raise WeightsError(f"there is no rank {rank} in a world of {self.world}")
        parts = self._held[name]
        return parts[rank if len(parts) > 1 else 0]


def load_weights(
    index: CheckpointIndex,
    model: Model,
    world: int,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> Weights:
    """Verify the checkpoint and load `names` (None: all) for every rank of `world`.

    `progress` receives (bytes done, bytes in all) of the files. `cache_dir` keeps the token map.

    Raises:
        WeightsError: when the checkpoint does not fit the model, holds values that are no numbers,
            cannot be split over `world`, or does not fit into memory.
        WorldError: when `world` does not divide the model.
    """
    model.check_world(world)
    _refuse_shard(index)
    index.verify(model)
    table = weight_table(model)
    rows = _chosen(table, names)
    _refuse_too_large(index, rows)
    _log_vision(model)

    total = sum(index.tensors[s].nbytes for row in rows for s in row.sources)
    started, done = time.perf_counter(), 0
    computed = computed_weights(index, model, rows, cache_dir)
    held: dict[str, list[Any]] = {}
    for row in rows:
        if not row.sources:
            held[row.name] = [computed[row.name]]
        elif row.format == "rows8":
            held[row.name] = [_mapped(index, row)]
        else:
            ranks = range(1 if row.axis is None else world)
            held[row.name] = [_host(index, row, world, rank) for rank in ranks]
        done += sum(index.tensors[s].nbytes for s in row.sources)
        if progress:
            progress(done, total)
    seconds = time.perf_counter() - started
    log.info(
        "weights: %d bytes of %d weights for world %d in %.2f s (%.2f GB/s)",
        total, len(rows), world, seconds, total / max(seconds, 1e-9) / 1e9,
    )  # fmt: skip
    return Weights(world, held)


def _chosen(table: dict[str, Row], names: Iterable[str] | None) -> list[Row]:
    if names is None:
        return list(table.values())
    wanted = list(dict.fromkeys(names))
    if unknown := [name for name in wanted if name not in table]:
        raise WeightsError(f"this model has no weight {', '.join(unknown)}")
    return [table[name] for name in wanted]


def _host(index: CheckpointIndex, row: Row, world: int, rank: int) -> npt.NDArray[Any]:
    shape = list(row.shape)
    if row.axis is not None:
        part = shard_range(row, world, rank)
        shape[row.axis] = part.stop - part.start

    def stored(source: str) -> npt.NDArray[Any]:
        return index.raw(source)[stored_slices(row, source, world, rank)]

    out = np.empty(shape, row.dtype)
    pieces = out if row.format == "fp4" else out[None]
    step = 2 if row.format in ("fp8", "fp4") else 1
    for piece, at in zip(pieces, range(0, len(row.sources), step), strict=True):
        codes, *scales = row.sources[at : at + step]
        if scales:  # the whole tensor, so that the index in the message is the one on disk
            check_scales(index.raw(scales[0]), scales[0])
        scale = stored(scales[0]) if scales else None
        piece[...] = dequantise(row.format, stored(codes), scale, codes)
    out.flags.writeable = (
        False  # ranks share unsplit arrays: one that wrote would change the others
    )
    return out


def _mapped(index: CheckpointIndex, row: Row) -> MappedRows:
    codes, scales = (index.raw(source) for source in row.sources)
    for start in range(0, len(scales), _SCAN_ROWS):
        check_scales(scales[start : start + _SCAN_ROWS], row.sources[1], (start, 0))
    return MappedRows(codes, scales)


def computed_weights(
    index: CheckpointIndex, model: Model, rows: list[Row], cache_dir: Path | None
) -> dict[str, npt.NDArray[Any]]:
    """The weights that no file holds: rotary frequencies, token map, Engram hash constants."""
    wanted = {row.name for row in rows if not row.sources}
    values: dict[str, npt.NDArray[Any]] = {f"rope.{t}": f for t, f in frequencies(model).items()}
    if TOKEN_MAP in wanted:
        values[TOKEN_MAP] = build_token_map(index.folder / "tokenizer.json", model, cache_dir)
    if wanted - {TOKEN_MAP} - set(values):
        for layer, constants in engram_hashes(model).items():
            for name, value in vars(constants).items():
                values[f"layers.{layer}.engram.{name}"] = value
    return values


def _refuse_shard(index: CheckpointIndex) -> None:
    if index.shard:
        raise WeightsError(
            f"{index.folder} is rank {index.shard.rank} of a checkpoint pre-sharded for "
            f"{index.shard.world} ranks: the NumPy backend needs the folder it was made from"
        )


def _refuse_too_large(index: CheckpointIndex, rows: list[Row]) -> None:
    """Better one sentence now than the kernel's out-of-memory killer in an hour."""
    needed = sum(
        np.dtype(row.dtype).itemsize * int(np.prod(row.shape, dtype=np.int64))
        for row in rows
        if row.format != "rows8"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise WeightsError(
            f"{index.folder} takes {needed / 1e9:,.1f} GB of memory in the NumPy backend, this "
            f"machine has {memory / 1e9:,.1f}: use a smaller checkpoint"
        )


def _log_vision(model: Model) -> None:
    sizes = [tensor_bytes(s) for s in expected_tensors(model).values() if s.group == VISION]
    if sizes:
        log.info("vision: %d tensors (%d bytes) recognised and skipped", len(sizes), sum(sizes))
