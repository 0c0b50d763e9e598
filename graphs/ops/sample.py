"""The next token of each sequence from its logits (architecture.md section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.draw import pick
from ultraflash.graphs.numerics import F32, F64
from ultraflash.graphs.philox import U32, U64, Purpose, uniform
from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.rows import I32

TOP_LOGPROBS = 20


def constrain(logits: F32, mask: U32, bias_ids: I32, bias: F32, banned: int) -> F32:
    """Logits with bias added and forbidden tokens at -inf. [V]; mask: [V/32] bits; banned: a token
    id or -1."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits)).view(
        np.bool_
    )
    out = np.where(allowed, logits, np.float32(-np.inf))
    used = bias_ids >= 0
    if used.any():
        np.add.at(out, bias_ids[used], bias[used])
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


@dataclass(frozen=True)
class Sample(Op):
    """A token for each sequence, and log-probabilities where `want_logprobs` is set.

    Temperature 0 takes the largest logit (the lower id among equals), never a division.
    Log-probabilities are those
    of the constrained logits at temperature 1.

    Shapes:
        logits: [S, V] f32; mask: [S, ceil(V/32)] u32, bit = allowed; bias_ids: [S, B] i32, -1 =
        unused;
        bias: [S, B] f32; banned: [S] i32 token that may not come, or -1; temperature, top_p: [S]
        f32; top_k: [S] i32,
        0 = off; seed: [S] u64; position, step: [S] i32; want_logprobs: [S] i32;
        token: [S] i32; logprob: [S] f32; top_ids: [S, 20] i32; top_logprobs: [S, 20] f32.
    """

    OUT: ClassVar[tuple[str, ...]] = ("token", "logprob", "top_ids", "top_logprobs")
    logits: Ref
    mask: Ref
    bias_ids: Ref
    bias: Ref
    banned: Ref
    temperature: Ref
    top_p: Ref
    top_k: Ref
    seed: Ref
    position: Ref
    step: Ref
    want_logprobs: Ref
    token: Ref
    logprob: Ref
    top_ids: Ref
    top_logprobs: Ref

    @staticmethod
    def reference(
        logits: F32,
        mask: U32,
        bias_ids: I32,
        bias: F32,
        banned: I32,
        temperature: F32,
        top_p: F32,
        top_k: I32,
        seed: U64,
        position: I32,
        step: I32,
        want_logprobs: I32,
    ) -> tuple[I32, F32, I32, F32]:
        """Inverse distribution function in id order, float64."""
        count = len(logits)
        token, logprob = np.zeros(count, np.int32), np.zeros(count, np.float32)
        best = min(TOP_LOGPROBS, logits.shape[1])
        top_ids = np.full((count, TOP_LOGPROBS), -1, np.int32)
        top_logprobs = np.full((count, TOP_LOGPROBS), -np.inf, np.float32)
        draw = uniform(seed, position, step, Purpose.SAMPLE)
        for s in range(count):
            final = constrain(logits[s], mask[s], bias_ids[s], bias[s], int(banned[s]))
            if temperature[s] == 0:
                token[s] = final.argmax()
            else:
                p = distribution(final, float(temperature[s]), float(top_p[s]), int(top_k[s]))
                token[s] = pick(p, float(draw[s]))
            if want_logprobs[s]:
                logs = log_softmax(final)
                order = np.argsort(-logs, kind="stable")[:best]
                logprob[s] = logs[token[s]]
                top_ids[s, :best], top_logprobs[s, :best] = order, logs[order]
        return token, logprob, top_ids, top_logprobs


def log_softmax(logits: F32) -> F32:
    """Natural logarithms of the probabilities; -inf stays -inf."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    logs: F32 = (wide - peak - np.log(np.exp(wide - peak).sum())).astype(np.float32)
    return logs
