"""Softmax with a sink in float64, and what an attention output may be off by (model.md 4.4)."""

from __future__ import annotations

import numpy as np

from helpers.compare import assert_rounded, assert_within
from helpers.formats import F32, F64, bf16, bf16_ulp
from helpers.values import turned

# fp32 logits, exponentials and a quotient; logits of a few units carry their ulp into the weights.
PLAIN = 2.0**-19


def plain(logits: F64, keys: F64, sink: float) -> F64:
    peak = logits.max()
    w = np.exp(logits - peak)
    total: F64 = (w @ keys) / (w.sum() + np.exp(sink - peak))
    return total


def rounded_in_groups(logits: F64, keys: F64, sink: float) -> F64:
    """Groups of 64 keys; weights rounded relative to the maximum so far, for values only."""
    values, total, peak = np.zeros(keys.shape[1]), 0.0, -np.inf
    for at in range(0, len(keys), 64):
        group = logits[at : at + 64]
        new = max(peak, group.max())
        w = np.exp(group - new)
        values = values * np.exp(peak - new) + bf16(w).astype(np.float64) @ keys[at : at + 64]
        total = total * np.exp(peak - new) + w.sum()
        peak = new
    out: F64 = values / (total + np.exp(sink - peak))
    return out


def assert_row(got: F32, mixed: F64, cos: F32, sin: F32, error: float) -> None:
    """`got` [H*E]: mixed, rounded to bf16, its last dims turned back and rounded again."""
    heads, dim = mixed.shape
    pairs = len(cos)
    still, y = dim - 2 * pairs, got.reshape(heads, dim)
    slack = error * np.abs(mixed).max(axis=-1, keepdims=True)
    assert_rounded(y[:, :still], mixed[:, :still], "bf16", np.broadcast_to(slack, (heads, still)))
    want = turned(mixed[None], cos[None], -sin[None])[0, :, still:]
    # The first rounding, half an ulp of each of the pair, is turned with the values.
    pair = np.abs(mixed[:, still:]).reshape(heads, pairs, 2).sum(axis=-1).repeat(2, axis=-1)
    assert_within(y[:, still:], want, bf16_ulp(pair) + 2 * slack)
