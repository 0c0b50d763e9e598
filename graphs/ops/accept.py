"""Which drafts stay, and the token behind them (architecture.md section 5; block verification of
arXiv 2403.10444).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32, F64
from ultraflash.graphs.ops.select_topk import held_geometry
from ultraflash.graphs.philox import U32, U64
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32
from ultraflash.graphs.sampling import TOP_LOGPROBS, constrain, distribution, log_softmax
from ultraflash.graphs.verify import block_verify, greedy_verify, verify_draws


@dataclass(frozen=True)
class Accept(Op):
    """Verify each sequence's rows: row 0 is the token sampled last, rows 1.. are drafts.

    Row i's logits give the distribution of the token behind it. `accepted` drafts stay; `token`
    comes behind them. At temperature 0 a draft stays while it is the largest logit. Above 0 without
    `q` none stays: what its drafts were drawn from is not known.
    Log-probabilities are those of the constrained logits at temperature 1, for the token emitted
    behind each row up to the last accepted one.

    Shapes:
        logits: [T, V] f32; ids, slot, position: [T] i32; row_start: [S+1] i32; q: [slots, B, V]
        f32, what drafts were drawn from (absent in plans without drafting); mask: [T, ceil(V/32)]
        u32; bias_ids, bias:
        [S, n]; banned: [T] i32; temperature, top_p: [S] f32; top_k, step, want_logprobs: [S] i32;
        seed: [S] u64; accepted, token: [S] i32; logprob: [T] f32; top_ids: [T, 20] i32;
        top_logprobs: [T, 20] f32.
    """

    OUT: ClassVar[tuple[str, ...]] = ("accepted", "token", "logprob", "top_ids", "top_logprobs")
    logits: Ref
    ids: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    q: Ref | None
    mask: Ref
    bias_ids: Ref
    bias: Ref
    banned: Ref
    temperature: Ref
    top_p: Ref
    top_k: Ref
    seed: Ref
    step: Ref
    want_logprobs: Ref
    accepted: Ref
    token: Ref
    logprob: Ref
    top_ids: Ref
    top_logprobs: Ref

    @staticmethod
    def reference(
        logits: F32,
        ids: I32,
        slot: I32,
        position: I32,
        row_start: I32,
        q: F32 | None,
        mask: U32,
        bias_ids: I32,
        bias: F32,
        banned: I32,
        temperature: F32,
        top_p: F32,
        top_k: I32,
        seed: U64,
        step: I32,
        want_logprobs: I32,
    ) -> tuple[I32, I32, F32, I32, F32]:
        """float64 probabilities; sequences one by one."""
        sequences, rows = len(row_start) - 1, len(ids)
        accepted, token = np.zeros(sequences, np.int32), np.zeros(sequences, np.int32)
        logs = _Logprobs(rows)
        for s in range(sequences):
            own = slice(int(row_start[s]), int(row_start[s + 1]))
            if own.start == own.stop:
                continue
            final = np.stack(
                [
                    constrain(logits[r], mask[r], bias_ids[s], bias[s], int(banned[r]))
                    for r in range(own.start, own.stop)
                ]
            )
            drafts = ids[None, own.start + 1 : own.stop]
            if temperature[s] == 0:
                best = final.argmax(axis=1)[None].astype(np.int32)
                kept, last = greedy_verify(best, drafts)
            else:
                how = float(temperature[s]), float(top_p[s]), int(top_k[s])
                p = np.stack([distribution(row, *how) for row in final])[None]
                drawn = _drawn(q, int(slot[own.start]), drafts.shape[1], p.shape[2])
                behind = position[own.start : own.start + 1] + 1
                coins, draw = verify_draws(seed[s : s + 1], behind, step[s : s + 1], drawn.shape[1])
                kept, last = block_verify(p, drawn, drafts, coins, draw)
            accepted[s], token[s] = kept[0], last[0]
            if want_logprobs[s]:
                logs.fill(own.start, final, [*drafts[0, : kept[0]].tolist(), int(last[0])])
        return accepted, token, logs.logprob, logs.top_ids, logs.top_logprobs

    def geometry(self) -> Geometry:
        """A cluster of CTAs a sequence, which hold a row of logits."""
        return held_geometry(self.token.shape[0], self.logits.shape[1])

    def state_bytes(self) -> int:
        """The distribution of every draft among the rows."""
        if self.q is None:
            return 0
        drafts = self.logits.shape[0] - (self.row_start.shape[0] - 1)
        return 4 * drafts * self.q.shape[2]


def _drawn(q: F32 | None, slot: int, count: int, vocab: int) -> F64:
    """What the drafts of a slot were drawn from, [1, count, V]; zero where nobody knows."""
    drawn = np.zeros((1, count, vocab))
    if q is not None:
        drawn[0, : q.shape[1]] = q[slot, :count]
    return drawn


class _Logprobs:
    """The three log-probability outputs of a step."""

    def __init__(self, rows: int) -> None:
        self.logprob = np.zeros(rows, np.float32)
        self.top_ids = np.full((rows, TOP_LOGPROBS), -1, np.int32)
        self.top_logprobs = np.full((rows, TOP_LOGPROBS), -np.inf, np.float32)

    def fill(self, first: int, final: F32, emitted: list[int]) -> None:
        """Rows from `first` on: the token emitted behind each, and the best alternatives."""
        for row, logits, chosen in zip(
            range(first, first + len(emitted)), final, emitted, strict=False
        ):
            logs = log_softmax(logits)
            best = np.argsort(-logs, kind="stable")[:TOP_LOGPROBS]
            self.logprob[row] = logs[chosen]
            self.top_ids[row, : len(best)], self.top_logprobs[row, : len(best)] = best, logs[best]
