"""Tokens from probabilities: the one rule by which every random token of a step is drawn.

Inverse distribution function in id order, in float64. The first token of an answer, a draft's
proposals and the token behind a verified prefix all come from here, so that equal numbers give
equal tokens wherever they are drawn.
"""

from __future__ import annotations

import numpy as np

from ultraflash.graphs.numerics import F64
from ultraflash.graphs.rows import I32


def pick(p: F64, u: float) -> int:
    """The first id whose cumulative probability exceeds u; never an id of probability 0.

    p: [V], not all zero, need not add up to 1; 0 <= u < 1.
    """
    return int(pick_many(p[None], np.array([u]))[0])


def pick_many(p: F64, u: F64) -> I32:
    """`pick` for each row. p: [N, V]; u: [N]; result: [N]."""
    cumulative = np.cumsum(p, axis=1)
    target = u * cumulative[:, -1]
    token: I32 = (cumulative <= target[:, None]).sum(axis=1, dtype=np.int32)
    return token
