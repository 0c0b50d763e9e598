"""Weights as a GPU holds them: one allocation each, experts one behind the other.

Raw bytes travel from the mapped files; nothing is decoded on the host. Codes may be laid out anew
on the device (layout.py). Scales stand in an allocation of their own beside the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Ref
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.formats import check_scales
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.layout import (
    SCALED,
    Relayout,
    check_range,
    layout_of,
    scales_layout_of,
)
from ultraflash.runtime.weights.load import computed_weights
from ultraflash.runtime.weights.table import Row, weight_table

Progress = Callable[[int, int], None]


class Place(Protocol):
    """Puts arrays of one shape one behind the other into one allocation, each in `layout`."""

    def __call__(
        self, name: str, parts: Sequence[npt.NDArray[Any]], layout: type[Relayout] | None = None
    ) -> int:
        """The device address."""


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
) -> DeviceWeights:
    """Verify the checkpoint and place every weight.

    Raises:
        WeightsError: when the checkpoint does not fit the model or holds scales out of range.
    """
    index.verify(model)
    rows = list(weight_table(model).values())
    total = sum(index.tensors[s].nbytes for row in rows for s in row.sources)
    computed = computed_weights(index, model, rows, cache_dir)
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    done = 0
    for row in rows:
        codes, scales = ([computed[row.name]], []) if not row.sources else _stored(index, row)
        addresses = [place(row.name, codes, layout_of(row.name, row.format))]
        if scales:
            addresses.append(place(row.name, scales, scales_layout_of(row.format)))
        held[row.name] = row.shape, tuple(addresses)
        done += sum(index.tensors[s].nbytes for s in row.sources)
        if progress:
            progress(done, total)
    return DeviceWeights(held)


def _stored(
    index: CheckpointIndex, row: Row
) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """Codes and, for quantised formats, scales; of stacked weights one array an expert."""
    if row.format not in SCALED:
        return [index.raw(row.sources[0])], []
    scales = [index.raw(s) for s in row.sources[1::2]]
    for name, array in zip(row.sources[1::2], scales, strict=True):
        check_scales(array, name)
        check_range(array, name, row.format)
    return [index.raw(s) for s in row.sources[::2]], scales
