"""Counter-based random numbers: the same (seed, position, step, purpose) gives the same number on
every backend.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key = the
request's seed, counter = (position, step, purpose, 0); see architecture.md section 5 for why the
step belongs to it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEP = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Purpose(IntEnum):
    """What a random number decides; part of the counter, so that no draw is used twice."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3  # the token behind the accepted drafts, also where there were none


def philox(key: U64, counter: U32) -> U32:
    """Ten rounds. key: [N] u64; counter: [N, 4] u32; result: [N, 4] u32."""
    a, b, c, d = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key & _LOW, key >> _HALF
    for _ in range(10):
        left, right = a * _MULTIPLY[0], c * _MULTIPLY[1]
        a, b, c, d = (right >> _HALF) ^ b ^ k0, right & _LOW, (left >> _HALF) ^ d ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEP[0]) & _LOW, (k1 + _KEY_STEP[1]) & _LOW
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)


def uniform(
    seed: U64, position: npt.NDArray[np.int32], step: npt.NDArray[np.int32], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """One number strictly between 0 and 1 for each row: (first word + 1/2) / 2^32. [N]."""
    counter = np.zeros((len(seed), 4), np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = position, step, purpose
    return (philox(seed, counter)[:, 0].astype(np.float64) + 0.5) * 2.0**-32
