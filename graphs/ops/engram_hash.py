"""Rows of an Engram table that a token's n-grams name (model.md 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.ops.engram_ids import DEAD
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32, I64, looked_back


def hash_rows(grams: I64, multipliers: I64, primes: I64, offsets: I64) -> I64:
    """Table rows of n-grams given newest first. [T, orders+1] -> [T, columns].

    `grams` are live compressed ids; xor of products, one modulus a column, columns grouped by
    order.
    """
    products = grams * multipliers
    mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
    heads = len(primes) // mixed.shape[1]
    return np.repeat(mixed, heads, axis=1) % primes + offsets


def live_grams(ids: I64, before_start: npt.NDArray[np.bool_], pad: int) -> I64:
    """Give dead or missing positions, and all farther ones, the pad id. [T, n] newest first."""
    dead = np.logical_or.accumulate((ids == DEAD) | before_start, axis=1)
    return np.where(dead, pad, ids)


@dataclass(frozen=True)
class EngramHash(Op):
    """For each row: the table rows of its n-grams of every order and head.

    Shapes:
        ids: [T] i32 compressed; history: [slots, R] i32 of earlier rows; slot, position: [T] i32;
        row_start: [S+1] i32; token_map: [V] i64; multipliers: [orders+1] i64; primes, offsets:
        [columns] i64; y: [T, columns] i64.
    """

    ids: Ref
    history: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    token_map: Ref
    multipliers: Ref
    primes: Ref
    offsets: Ref
    y: Ref
    pad_token: int

    @staticmethod
    def reference(
        ids: I32,
        history: I32,
        slot: I32,
        position: I32,
        row_start: I32,
        token_map: I64,
        multipliers: I64,
        primes: I64,
        offsets: I64,
        pad_token: int,
    ) -> I64:
        """Exact int64 arithmetic."""
        back = np.arange(len(multipliers))
        grams = looked_back(ids, history, back, slot, position, row_start).astype(np.int64)
        grams = live_grams(grams, back > position[:, None], int(token_map[pad_token]))
        return hash_rows(grams, multipliers, primes, offsets)

    def geometry(self) -> Geometry:
        """A thread a column."""
        return Geometry(self.ids.shape[0], threads=-(-self.primes.shape[0] // 32) * 32)

    def cost(self) -> Cost:
        """Rows, the history they reach back to, constants, and one entry of the map."""
        parts = (self.ids, self.slot, self.position, self.row_start, self.y)
        constants = (self.multipliers, self.primes, self.offsets)
        moved = sum(ref.nbytes for ref in (*parts, *constants)) + 8
        return Cost(moved + self.state_bytes(), 0)

    def state_bytes(self) -> int:
        """The ids in front of every row, as many as the longest n-gram needs."""
        return 4 * self.ids.shape[0] * (self.multipliers.shape[0] - 1)
