"""Verification without chance: every draft block and every outcome, with its exact weight.

A tree of target and draft distributions over all prefixes of a tiny vocabulary. The uniform
numbers are integrated out by hand: each passes with the chance that graphs/verify.py computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultraflash.graphs.numerics import F64
from ultraflash.graphs.rows import I32, I64
from ultraflash.graphs.verify import block_chances, block_reach, remainder, token_chances


@dataclass(frozen=True, eq=False)
class Tree:
    """`p[i]` [V**i, V] behind each prefix of i drafts, i = 0 .. m; `q[i]` likewise, i < m."""

    p: Sequence[F64]
    q: Sequence[F64]

    @property
    def vocab(self) -> int:
        return int(self.p[0].shape[1])

    @property
    def m(self) -> int:
        return len(self.q)

    @cached_property
    def drafts(self) -> I32:
        """Every block of drafts. [S, m], S = V ** m."""
        count = self.vocab**self.m
        place = self.vocab ** np.arange(self.m - 1, -1, -1)
        return (np.arange(count)[:, None] // place % self.vocab).astype(np.int32)

    def prefix(self, i: int) -> I64:
        """For each block, the number of its first i drafts as a row of p[i] and q[i]. [S]."""
        number: I64 = np.arange(self.vocab**self.m) // self.vocab ** (self.m - i)
        return number

    @cached_property
    def rows(self) -> tuple[F64, F64]:
        """p [S, m+1, V] and q [S, m, V] as verification takes them."""
        p = np.stack([self.p[i][self.prefix(i)] for i in range(self.m + 1)], axis=1)
        q = [self.q[i][self.prefix(i)] for i in range(self.m)]
        return p, np.stack(q, axis=1) if q else np.zeros((1, 0, self.vocab))

    @cached_property
    def chance(self) -> F64:
        """Probability that the draft model makes each block. [S]."""
        q = self.rows[1]
        made = np.take_along_axis(q, self.drafts[:, :, None], axis=2)[..., 0]
        return np.asarray(made.prod(axis=1))

    @cached_property
    def target(self) -> F64:
        """The target's joint distribution of m+1 tokens. [V ** (m+1)]."""
        return self._continued(np.ones(1), 0)

    def passing(self, rule: str, kept: int) -> tuple[F64, F64]:
        """P(accepted = t) for t = 0 .. m, given each block, and scale at t. [S, m+1] both."""
        p, q = self.rows
        keep = np.full(len(self.drafts), kept, np.int32)
        one = np.ones((len(self.drafts), 1))
        if rule == "block":  # the last that passes counts
            scale = block_reach(p, q, self.drafts, keep)
            h = np.concatenate([one, block_chances(p, q, scale, keep)], axis=1)
            later = np.cumprod((1 - h)[:, :0:-1], axis=1)[:, ::-1]
            return h * np.concatenate([later, one], axis=1), scale
        h = token_chances(p, q, self.drafts, keep)  # all up to the last must pass
        before = np.concatenate([one, np.cumprod(h, axis=1)], axis=1)
        return before * np.concatenate([1 - h, one], axis=1), np.ones_like(before)

    def emissions(self, rule: str, kept: int) -> F64:
        """What follows each block when `kept` of it are verified: distribution of m+1 tokens, those
        behind the emitted ones from the target. [S, V ** (m+1)]."""
        p, q = self.rows
        passing, scale = self.passing(rule, kept)
        blocks = len(self.drafts)
        out = np.zeros((blocks, self.vocab ** (self.m + 1)))
        for t in range(kept + 1):
            accepted = np.full(blocks, t, np.int32)
            weights = remainder(p, q, accepted, np.full(blocks, kept, np.int32), scale[:, t])
            token = weights / weights.sum(axis=1, keepdims=True) * passing[:, t, None]
            for s in np.flatnonzero(passing[:, t]):
                start = np.zeros(self.vocab ** (t + 1))
                start[self.prefix(t)[s] * self.vocab :][: self.vocab] = token[s]
                out[s] += self._continued(start, t + 1)
        return out

    def expected_accepted(self, rule: str, kept: Sequence[int]) -> float:
        """Mean number of accepted drafts when block s has kept[s] verified."""
        counts = np.arange(self.m + 1)
        each = np.stack([self.passing(rule, k)[0] @ counts for k in range(self.m + 1)])
        return float(self.chance @ each[np.asarray(kept), np.arange(len(self.drafts))])

    def _continued(self, start: F64, length: int) -> F64:
        """Weights of prefixes [V ** length], continued by the target to m+1 tokens."""
        for i in range(length, self.m + 1):
            start = (start[:, None] * self.p[i]).ravel()
        return start


def answers(tree: Tree, rule: str, kept: Sequence[int]) -> F64:
    """Distribution of the m+1 tokens when block s has kept[s] verified. [V ** (m+1)]."""
    table = np.stack([tree.emissions(rule, k) for k in range(tree.m + 1)], axis=1)
    chosen = table[np.arange(len(tree.drafts)), np.asarray(kept)]
    return np.asarray(tree.chance @ chosen)
