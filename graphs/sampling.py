"""From logits to a probability distribution and a token: the rules that p and q share
(architecture.md section 5).
"""

from __future__ import annotations

import numpy as np

from ultraflash.graphs.numerics import F32, F64
from ultraflash.graphs.philox import U32
from ultraflash.graphs.rows import I32

TOP_LOGPROBS = 20


def add_bias(logits: F32, bias_ids: I32, bias: F32) -> F32:
    """Logits with a request's bias added; ids of -1 are unused. [V] -> [V]."""
    used = bias_ids >= 0
    if not used.any():
        return logits
    out = logits.copy()
    np.add.at(out, bias_ids[used], bias[used])
    return out


def constrain(logits: F32, mask: U32, bias_ids: I32, bias: F32, banned: int) -> F32:
    """Logits with bias added and forbidden tokens at -inf. [V]; mask: [V/32] bits, 1 = allowed."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits))
    out = np.where(allowed > 0, add_bias(logits, bias_ids, bias), np.float32(-np.inf))
    if banned >= 0:
        out[banned] = -np.inf
    return out


def distribution(logits: F32, temperature: float, top_p: float, top_k: int) -> F64:
    """Probabilities after temperature, then top_k, then top_p. [V] -> [V].

    Among equal logits the lower id comes first; top_p keeps the fewest tokens whose sum reaches it.
    """
    scaled = logits.astype(np.float64) / temperature
    p: F64 = np.exp(scaled - scaled.max())
    p /= p.sum()
    if top_k > 0 or top_p < 1:
        order = np.argsort(-p, kind="stable")
        kept = len(order) if top_k <= 0 else min(top_k, len(order))
        reached = np.cumsum(p[order[:kept]])
        if top_p < 1:
            kept = min(kept, int(np.searchsorted(reached, top_p * reached[-1])) + 1)
        p[order[kept:]] = 0
        p /= p.sum()
    return p


def log_softmax(logits: F32) -> F32:
    """Natural logarithms of the probabilities; -inf stays -inf."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    logs: F32 = (wide - peak - np.log(np.exp(wide - peak).sum())).astype(np.float32)
    return logs
