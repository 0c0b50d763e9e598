"""Rows of a step: how reference operations find a row's neighbours and its place in state.

A step's rows are ragged over sequences: rows row_start[s] .. row_start[s+1]-1 belong to sequence s
and stand at consecutive positions. Rows from row_start[-1] on are idle (slot -1): they are computed
and thrown away.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Element = TypeVar("Element", bound=np.generic)


def first_row(row_start: I32, rows: int) -> I64:
    """For each row, the first row of its sequence in this step; idle rows are their own. [rows]."""
    first = np.arange(rows)
    counts = np.diff(row_start)
    first[: row_start[-1]] = np.repeat(row_start[:-1], counts)
    return first


def looked_back(
    now: npt.NDArray[Element],
    ring: npt.NDArray[Element],
    back: I64,
    slot: I32,
    position: I32,
    row_start: I32,
) -> npt.NDArray[Element]:
    """What stood `back[n]` positions before each row: from this step's rows, else from the ring of
    earlier steps.

    Shapes:
        now: [T, ...] values of this step's rows; ring: [slots, R, ...]; back: [N]; result: [T, N,
        ...]. Positions before 0 give arbitrary (finite) values: the caller masks them.
    """
    rows = np.arange(len(position))
    inside = back[None, :] <= (rows - first_row(row_start, len(rows)))[:, None]
    here = np.where(inside, rows[:, None] - back[None, :], 0)
    if inside.all():
        return now[here]
    there = (position[:, None] - back[None, :]) & (ring.shape[1] - 1)
    before: npt.NDArray[Element] = ring[slot[:, None], there]
    if not inside.any():
        return before
    mixed: npt.NDArray[Element] = np.where(
        inside.reshape(*inside.shape, *(1,) * (now.ndim - 1)), now[here], before
    )
    return mixed
