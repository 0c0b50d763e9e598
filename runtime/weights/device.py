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
from ultraflash.runtime.weights.formats import FP4_LARGEST_SCALE, NAN_SCALE, check_scales
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.layout import (
    SCALED,
    Relayout,
    check_range,
    layout_of,
    scales_layout_of,
)
from ultraflash.runtime.weights.load import computed_weights
from ultraflash.runtime.weights.part import Part
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
    part: Part = Part(),  # noqa: B008
) -> DeviceWeights:
    """Verify the checkpoint and place one rank's part of every weight.

    Raises:
        WeightsError: when the checkpoint does not fit the model, holds scales out of range or
            cannot be split.
    """
    index.verify(model)
    rows = list(weight_table(model).values())
    total = sum(index.tensors[s].nbytes for row in rows for s in row.sources)
    computed = computed_weights(index, model, rows, cache_dir)
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    done = 0
    for row in rows:
        codes, scales = ([computed[row.name]], []) if not row.sources else _stored(index, row, part)
        addresses = [place(row.name, codes, layout_of(row.name, row.format))]
        if scales:
            addresses.append(place(row.name, scales, scales_layout_of(row.format)))
        held[row.name] = part.shape(row), tuple(addresses)
        done += sum(index.tensors[s].nbytes for s in row.sources)
        if progress:
            progress(done, total)
    return DeviceWeights(held)


def _stored(
    index: CheckpointIndex, row: Row, part: Part
) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """Codes and, for quantised formats, scales; of stacked weights one array an expert."""
    if row.format not in SCALED:
        return [part.stored(index, row, row.sources[0])], []
    largest = FP4_LARGEST_SCALE if row.format == "fp4" else NAN_SCALE - 1
    for name in row.sources[1::2]:  # the whole tensor: the index in the message is the one on disk
        array = index.raw(name)
        check_scales(array, name, largest=largest)
        if row.format == "fp8":
            check_range(array, name)
    codes, scales = (
        [part.stored(index, row, s) for s in row.sources[first::2]] for first in (0, 1)
    )
    return codes, scales
