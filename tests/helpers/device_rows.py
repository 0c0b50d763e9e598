"""Random rows of a step, as far as an operation's shapes say what they may be.

They are ragged over sequences, with consistent slots, positions and row_start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.plan import Life, Op, Ref
from ultraflash.graphs.rows import I32

FAR = 100_000  # positions of operations that only rings bound


@dataclass(frozen=True)
class Rows:
    """The rows of a step: busy sequences from the front, idle rows at the end."""

    slot: I32
    position: I32
    row_start: I32

    def each(self) -> list[tuple[int, int, int]]:
        """(sequence, first row, end) of every sequence."""
        pairs = zip(self.row_start[:-1].tolist(), self.row_start[1:].tolist(), strict=True)
        return [(s, first, end) for s, (first, end) in enumerate(pairs)]


def some_rows(
    rng: np.random.Generator, rows: int, sequences: int, slots: int, limit: int,
    early: bool = False, longest: int | None = None,
) -> Rows:  # fmt: skip
    """`rows` rows of `sequences` sequences at positions below `limit`.

    `early`: near position 0, with idle rows. `longest`: rows of a sequence at most.
    """
    idle = int(rng.integers(0, rows // 2 + 1)) if early else 0
    busy = min(sequences, rows - idle)
    counts = np.ones(sequences, np.int64)
    counts[busy:] = 0
    for _ in range(rows - idle - busy):
        room = np.flatnonzero((counts > 0) & (counts < (longest or rows)))
        if len(room):
            counts[rng.choice(room)] += 1
    slot, position = np.full(rows, -1, np.int32), np.zeros(rows, np.int32)
    row_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    places = rng.permutation(slots)[:sequences]
    for s, n in enumerate(counts.tolist()):
        own = slice(row_start[s], row_start[s + 1])
        first = int(rng.integers(0, max(1, min(4 if early else limit, limit - n + 1))))
        slot[own] = places[s] if s < len(places) else -1
        position[own] = np.arange(first, first + n)
    return Rows(slot, position, row_start)


def block_rows(
    rng: np.random.Generator, count: int, block: int, slots: int, early: bool
) -> Rows:  # fmt: skip
    """`count` draft rows: blocks of one sequence each, the last idle if `early` and several."""
    sequences = count // block
    places = rng.permutation(max(slots, sequences))[:sequences].astype(np.int32)
    first = rng.integers(0, 4 if early else FAR, sequences)
    if early and sequences > 1:
        places[-1], first[-1] = -1, 0
    position = (first[:, None] + np.arange(block)).reshape(-1).astype(np.int32)
    row_start = np.arange(sequences + 1, dtype=np.int32) * block
    return Rows(places.repeat(block), position, row_start)


def rows_of(op: Op, rng: np.random.Generator, early: bool) -> Rows | None:
    """The rows of an operation's shapes, where it has any; `early` as in `some_rows`."""
    refs = dict(op.refs)
    slots = next((r.shape[0] for r in refs.values() if r.life is Life.STATE), 6)
    block = getattr(op, "block", None)
    if block and "row_start" not in refs:
        return block_rows(rng, refs["slot"].shape[0], block, slots, early)
    row = (
        refs.get("slot") or refs.get("position") or (refs.get("x") if "row_start" in refs else None)
    )
    if row is None:
        return None
    count = row.shape[0]
    sequences = refs["row_start"].shape[0] - 1 if "row_start" in refs else min(3, count)
    return some_rows(
        rng, count, sequences, max(slots, sequences), _limit(op, refs), early, _longest(op, refs)
    )


def _limit(op: Op, refs: dict[str, Ref]) -> int:
    entries = refs.get("main_codes") or (None if "pool" in refs else refs.get("scores"))
    if type(op).__name__ in ("StoreMainKv", "StoreIndexKey", "IndexScores"):
        entries = refs["codes"]
    if entries is not None:
        return entries.shape[1] * int(getattr(op, "ratio", 1))
    return (1 << 20) - 16 if "freq" in refs else FAR


def _longest(op: Op, refs: dict[str, Ref]) -> int | None:
    if type(op).__name__ != "Accept":
        return None
    return refs["q"].shape[1] + 1 if "q" in refs else 1
