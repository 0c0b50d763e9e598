"""What one rank of a world holds of a checkpoint, as windows into the mapped files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.table import Row, shard_range, stored_slices


@dataclass(frozen=True)
class Part:
    """Rank `rank` of `world`; by default all there is."""

    world: int = 1
    rank: int = 0

    def shape(self, row: Row) -> tuple[int, ...]:
        """The logical shape of this rank's part of a weight.

        Raises:
            WeightsError: when it cannot be split over so many.
        """
        shape = list(row.shape)
        if self.world > 1 and row.axis is not None:
            held = shard_range(row, self.world, self.rank)
            shape[row.axis] = held.stop - held.start
        return tuple(shape)

    def stored(self, index: CheckpointIndex, row: Row, source: str) -> npt.NDArray[Any]:
        """This rank's part of one of a weight's tensors, in the checkpoint's own bytes.

        Raises:
            WeightsError: as `shape`, or when the folder holds parts already.
        """
        if index.shard:
            raise WeightsError(
                f"{index.folder} is rank {index.shard.rank} of a checkpoint pre-sharded for "
                f"{index.shard.world} ranks: give the folder it was made from"
            )
        whole = index.raw(source)
        return (
            whole if self.world == 1 else whole[stored_slices(row, source, self.world, self.rank)]
        )

    def start(self, row: Row, source: str) -> tuple[int, ...]:
        """Where this rank's part of a stored matrix begins: row and column."""
        cuts = stored_slices(row, source, self.world, self.rank) if self.world > 1 else ()
        return tuple(cut.start or 0 for cut in cuts) or (0, 0)
