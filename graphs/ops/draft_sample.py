"""A drafted token, and the distribution it was drawn from (model.md 6.2, architecture.md 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.draw import pick
from ultraflash.graphs.numerics import F32
from ultraflash.graphs.ops.select_topk import held_geometry
from ultraflash.graphs.philox import U64, Purpose, uniform
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32
from ultraflash.graphs.sampling import add_bias, distribution


@dataclass(frozen=True)
class DraftSample(Op):
    """Draft `index` of every sequence from its block logits plus the Markov correction.

    Bias, temperature, top_k and top_p shape q as they shape p. The token mask does not: a forbidden
    draft is rejected at its row, never avoided here, since its successors' masks are not known yet.

    Shapes:
        logits: [S*B, V] f32; markov: [S, V] f32; at, slot: [S*B] i32 of the block rows; bias_ids:
        [S, n] i32; bias: [S, n] f32; temperature, top_p: [S] f32; top_k: [S] i32; seed: [S] u64;
        step: [S] i32; drafts: [S, B] i32, column `index` is written; q: [slots, B, V] f32, row
        `index` of a slot is written (not at temperature 0).
    """

    OUT: ClassVar[tuple[str, ...]] = ()
    UPDATES: ClassVar[tuple[str, ...]] = ("drafts", "q")
    logits: Ref
    markov: Ref
    at: Ref
    slot: Ref
    bias_ids: Ref
    bias: Ref
    temperature: Ref
    top_p: Ref
    top_k: Ref
    seed: Ref
    step: Ref
    drafts: Ref
    q: Ref
    index: int
    block: int

    @staticmethod
    def reference(
        logits: F32,
        markov: F32,
        at: I32,
        slot: I32,
        bias_ids: I32,
        bias: F32,
        temperature: F32,
        top_p: F32,
        top_k: I32,
        seed: U64,
        step: I32,
        drafts: I32,
        q: F32,
        index: int,
        block: int,
    ) -> None:
        """q is rounded to float32 before it is drawn from: what is kept is what was used."""
        mine = logits[index::block] + markov
        draw = uniform(seed, at[index::block] + 1, step, Purpose.DRAFT)
        for s, where in enumerate(slot[index::block].tolist()):
            final = add_bias(mine[s], bias_ids[s], bias[s])
            if temperature[s] == 0 or where < 0:
                drafts[s, index] = final.argmax()
                continue
            p = distribution(final, float(temperature[s]), float(top_p[s]), int(top_k[s]))
            q[where, index] = p
            drafts[s, index] = pick(q[where, index].astype(np.float64), float(draw[s]))

    def geometry(self) -> Geometry:
        """A cluster of CTAs a sequence, which hold a row of logits."""
        return held_geometry(*self.markov.shape)

    def cost(self) -> Cost:
        """Of the block's rows one of each sequence."""
        own = (self.logits, self.at, self.slot, self.drafts)
        shared = (self.markov, self.bias_ids, self.bias, self.temperature, self.top_p, self.top_k)
        moved = sum(ref.nbytes for ref in (*shared, self.seed, self.step))
        moved += sum(ref.nbytes // self.block for ref in own)
        return Cost(moved + self.state_bytes(), 0)

    def state_bytes(self) -> int:
        """One distribution a sequence."""
        return 4 * self.markov.shape[0] * self.q.shape[2]
