"""Weights as a GPU holds them: the checkpoint's own bytes, one allocation each, experts stacked.

Raw bytes travel from the mapped files; nothing is decoded on the host. Scales stand in an
allocation of their own beside the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Ref
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.formats import check_scales
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import computed_weights
from ultraflash.runtime.weights.part import Part
from ultraflash.runtime.weights.table import Row, weight_table

Progress = Callable[[int, int], None]
Place = Callable[[str, npt.NDArray[Any]], int]


class DeviceWeights:
    """Device addresses of every weight of one rank."""

    def __init__(self, held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        """What was placed: shape and addresses (codes, scales) by name."""
        self._held = held

    def addresses(self, ref: Ref) -> tuple[int, ...]:
        """Device pointers of a weight.

        Raises:
            WeightsError: when it was not loaded or has another shape.
        """
        if ref.name not in self._held:
            raise WeightsError(f"weight {ref.name} was not loaded")
        shape, addresses = self._held[ref.name]
        if shape != ref.shape:
            raise WeightsError(f"weight {ref} was loaded with shape {shape}")
        return addresses


def upload_weights(
    index: CheckpointIndex,
    model: Model,
    place: Place,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    part: Part = Part(),  # noqa: B008
) -> DeviceWeights:
    """Verify the checkpoint and place one rank's part; `place(name, bytes)` gives an address.

    Raises:
        WeightsError: when the checkpoint does not fit the model, holds NaN scales or cannot be
            split.
    """
    index.verify(model)
    rows = list(weight_table(model).values())
    total = sum(index.tensors[s].nbytes for row in rows for s in row.sources)
    computed = computed_weights(index, model, rows, cache_dir)
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    done = 0
    for row in rows:
        arrays = _stored(index, row, part) if row.sources else [computed[row.name]]
        held[row.name] = part.shape(row), tuple(place(row.name, array) for array in arrays)
        done += sum(index.tensors[s].nbytes for s in row.sources)
        if progress:
            progress(done, total)
    return DeviceWeights(held)


def _stored(index: CheckpointIndex, row: Row, part: Part) -> list[npt.NDArray[Any]]:
    """Codes and, for quantised formats, scales; experts one behind the other."""
    quantised = row.format in ("fp8", "fp4", "rows8")
    codes = [part.stored(index, row, s) for s in row.sources[:: 2 if quantised else 1]]
    if not quantised:
        return [codes[0]]
    names = row.sources[1::2]
    for name in names:  # the whole tensor, so that the index in the message is the one on disk
        check_scales(index.raw(name), name)
    scales = [part.stored(index, row, s) for s in names]
    stack = np.stack if row.format == "fp4" else lambda arrays: arrays[0]
    return [stack(codes), stack(scales)]
