"""Reads every byte of a checkpoint and reports values that are no numbers.

A damaged download nearly always shows here: NaN scale bytes, NaN codes, infinite bf16 or float32.
Packed FP4 has no such value; only its scales can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.runtime.weights.formats import NAN_SCALE
from ultraflash.runtime.weights.index import CheckpointIndex

_CHUNK_BYTES = 1 << 24


def find_damage(index: CheckpointIndex, read: Callable[[int], None] | None = None) -> list[str]:
    """One line for every tensor that holds something else than numbers; empty when all is well.

    Reads file by file in the order on disk. `read` hears every number of bytes looked at.
    """
    lines = []
    in_place = sorted(index.tensors.values(), key=lambda t: (t.file, t.offset))
    for info in in_place:
        values = index.raw(info.name)
        row_bytes = max(1, info.nbytes // max(1, len(values)))
        rows = max(1, _CHUNK_BYTES // row_bytes)
        count, first = 0, None
        for start in range(0, len(values), rows):
            chunk = values[start : start + rows]
            bad = _bad(info.dtype, chunk)
            if bad is not None:
                places = np.argwhere(bad)
                count += len(places)
                if first is None:
                    first = [start + int(places[0][0]), *(int(i) for i in places[0][1:])]
            if read:
                read(chunk.nbytes)
        if count:
            kind = f"NaN scale byte {NAN_SCALE}" if info.dtype == "F8_E8M0" else f"no {info.dtype}"
            lines.append(f"{info.name} in {info.file.name}: {kind} at {first}, {count} in all")
    return lines


def _bad(dtype: str, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
    """Where the values are no numbers; None when all are (decided without a mask in memory)."""
    if dtype == "F8_E8M0":
        return values == NAN_SCALE if values.max(initial=0) == NAN_SCALE else None
    if dtype == "I8":
        return None
    if dtype == "F32":
        bad: npt.NDArray[np.bool_] = ~np.isfinite(values)
    else:
        top = 0x7F if dtype == "F8_E4M3" else 0x7F80
        bad = (values & top) == top
    return bad if bad.any() else None
