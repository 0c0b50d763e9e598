"""The distribution of architecture.md section 5 in plain Python, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def biased(logits: Sequence[float], bias: Iterable[tuple[int, float]]) -> list[float]:
    """Logits and bias added as float32."""
    out = [np.float32(v) for v in logits]
    for token, value in bias:
        out[token] = np.float32(out[token] + np.float32(value))
    return [float(v) for v in out]


def chances(logits: Sequence[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Temperature above 0, then top_k, then top_p; the lower id first among equals."""
    peak, warmth = max(logits), float(np.float32(temperature))
    p = [math.exp((v - peak) / warmth) for v in logits]
    order = sorted(range(len(p)), key=lambda t: (-p[t], t))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, reached, kept = math.fsum(p[t] for t in order), 0.0, 0
        while reached < float(np.float32(top_p)) * total:
            reached += p[order[kept]]
            kept += 1
        order = order[: max(kept, 1)]
    total = math.fsum(p[t] for t in order)
    return [p[t] / total if t in order else 0.0 for t in range(len(p))]
