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
from ultraflash.runtime.weights.layout import SCALED, Relayout, check_range, layout_of
from ultraflash.runtime.weights.load import computed_weights
from ultraflash.runtime.weights.part import Part
from ultraflash.runtime.weights.table import Row, weight_table

Progress = Callable[[int, int], None]
Check = Callable[[int, int, npt.NDArray[Any]], None]


class Place(Protocol):
    """Puts arrays of one shape one behind the other into one allocation, each in `layout`."""

    def __call__(
        self,
        name: str,
        parts: Sequence[npt.NDArray[Any]],
        layout: type[Relayout] | None = None,
        check: Check | None = None,
    ) -> int:
        """The device address; `check` sees (part, first row, rows) before they leave."""


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
        WeightsError: when the checkpoint does not fit the model, cannot be split or holds scales
            out of range; the last may come from `place` only after this has returned.
    """
    index.verify(model)
    rows = list(weight_table(model).values())
    total = sum(index.tensors[s].nbytes for row in rows for s in row.sources)
    computed = computed_weights(index, model, rows, cache_dir)
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    done = 0
    for row in rows:
        codes, scales = _stored(index, row, part) if row.sources else ([computed[row.name]], [])
        addresses = [place(row.name, codes, layout_of(row.name, row.format))]
        if scales:
            addresses.append(place(row.name, scales, None, _scale_check(row, part)))
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
    codes, scales = row.sources[::2], row.sources[1::2]
    stored = [[part.stored(index, row, s) for s in sources] for sources in (codes, scales)]
    return stored[0], stored[1]


def _scale_check(row: Row, part: Part) -> Check:
    """Where they are copied anyway: a scan of their own would read them twice.

    Messages name the place on disk, not in a rank's part.
    """
    names = row.sources[1::2]
    starts = [part.start(row, name) for name in names]

    def check(number: int, first: int, rows: npt.NDArray[Any]) -> None:
        start = starts[number]
        check_scales(rows, names[number], (start[0] + first, *start[1:]))
        if row.format == "fp8":
            check_range(rows, names[number])

    return check
