"""A speculative engine in miniature: toy target and draft models, the engine's verification, width
rule and random keys, many conversations at once.

The target is a Markov chain, so that the exact joint distribution of an answer is a product; the
draft model is another one. Confidences depend on the last draft made, as c_i depends on y_i.
Methods are the places where tests/helpers/wrong_speculation.py goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.draw import pick_many
from ultraflash.graphs.numerics import F32, F64
from ultraflash.graphs.philox import U64, Purpose, uniform
from ultraflash.graphs.rows import I32
from ultraflash.graphs.verify import block_verify, token_verify, verify_draws
from ultraflash.graphs.width import KNOTS, keep_fixed, survival
from ultraflash.runtime.calibration import sigmoid
from ultraflash.runtime.width import lower_hull, prices

PROMPT = 7  # tokens before the answer: the first emitted token stands at this position
TOKENS = 4  # emitted tokens whose joint distribution is looked at

Verify = Callable[[F64, F64, I32, F64, F64, I32], tuple[I32, I32]]
VERIFY: dict[str, Verify] = {"block": block_verify, "token": token_verify}


@dataclass(frozen=True)
class Toy:
    """Models over V tokens. Row = the token before, row V = the prompt's end.

    Shapes: target, draft: [V+1, V] probabilities; allowed: [V+1, V] bool, what a grammar lets
    follow; confidence: [B, V] logits c_i by y_i.
    """

    target: F64
    draft: F64
    allowed: npt.NDArray[np.bool_]
    confidence: F64

    @property
    def vocab(self) -> int:
        return int(self.target.shape[1])

    @property
    def block(self) -> int:
        return len(self.confidence)

    @property
    def masked(self) -> F64:
        """The target under the mask: what answers must be distributed as."""
        p = self.target * self.allowed
        return np.asarray(p / p.sum(axis=1, keepdims=True))

    def joint(self) -> F64:
        """Exact distribution of the first TOKENS tokens. [V ** TOKENS]."""
        p = self.masked[self.vocab]
        for _ in range(TOKENS - 1):
            p = (p.reshape(-1, self.vocab)[:, :, None] * self.masked[: self.vocab]).reshape(-1)
        return np.asarray(p)


def make_toy(seed: int, vocab: int, block: int, masked: bool) -> Toy:
    """Models that disagree enough for every branch of verification to be taken often."""
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.full(vocab, 0.8), vocab + 1)
    draft = 0.6 * target + 0.4 * rng.dirichlet(np.full(vocab, 0.8), vocab + 1)
    allowed = np.ones((vocab + 1, vocab), np.bool_)
    if masked:  # one token forbidden behind each, never the same as the one before
        allowed[np.arange(vocab), (np.arange(vocab) + 1) % vocab] = False
    # Far apart by token: a rule that looks ahead learns much about the draft it decides on.
    order = rng.permuted(np.tile(np.arange(vocab), (block, 1)), axis=1)
    confidence = np.linspace(-2.5, 2.5, vocab)[order]
    return Toy(target, draft, allowed, confidence)


class Speculation:
    """The engine's loop: sample, draft, then steps of verify and draft."""

    # Plateaus, as a machine has them at tile sizes: the hull differs from the times.
    times_ms: F64 = np.array([1.0, 1.8, 1.82, 1.85, 2.0])
    rate = 1.3
    thresholds = (0.15, 0.15, 0.075, 0.0375)

    def __init__(self, toy: Toy, verify: str, width: str) -> None:
        """`verify`: block or token; `width`: all, fixed or adaptive."""
        self.toy, self.verify, self.width = toy, VERIFY[verify], width
        counts = np.zeros(toy.block + 1, np.int64)
        self.steps_by_accepted, self.steps_by_kept = counts, counts.copy()

    def run(self, seeds: U64) -> npt.NDArray[np.int32]:
        """The first TOKENS tokens of a conversation for each seed. [N, TOKENS]."""
        count = len(seeds)
        answer = np.zeros((count, TOKENS), np.int32)
        start = np.full(count, self.toy.vocab, np.int32)
        position, step = np.full(count, PROMPT, np.int32), np.zeros(count, np.int32)
        anchor = pick_many(
            self.toy.masked[start], self.numbers(seeds, position, step, Purpose.RESIDUAL)
        )
        answer[:, 0] = anchor
        drafts = self.draft(seeds, anchor, position + 1, step)
        alive, emitted, number = np.arange(count), np.ones(count, np.int64), 0
        while len(alive):
            number += 1
            step = np.full(len(alive), self.step_number(number), np.int32)
            first = (PROMPT + emitted).astype(np.int32)  # position of the first draft
            accepted, token, drafts = self.step(seeds, anchor, drafts, first, step)
            for i in range(drafts.shape[1] + 1):
                new = np.where(i < accepted, drafts[:, min(i, drafts.shape[1] - 1)], token)
                fits = (i <= accepted) & (emitted + i < TOKENS)
                answer[alive[fits], (emitted + i)[fits]] = new[fits]
            emitted, anchor = emitted + accepted + 1, token
            stay = emitted < TOKENS
            alive, emitted, anchor, seeds = alive[stay], emitted[stay], anchor[stay], seeds[stay]
            drafts = self.draft(seeds, anchor, (PROMPT + emitted).astype(np.int32), step[stay])
        return answer

    def step(
        self, seeds: U64, anchor: I32, drafts: I32, first: I32, step: I32
    ) -> tuple[I32, I32, I32]:
        """One step: width, target rows, verification. (accepted, token, drafts)."""
        before = np.concatenate([anchor[:, None], drafts], axis=1)
        p, q = self.toy.masked[before], self.toy.draft[before[:, :-1]]
        kept = self.keep(before)
        accept_u, last_u = self.verify_numbers(seeds, first, step, drafts.shape[1])
        accepted, token = self.verify(p, q, drafts, accept_u, last_u, kept)
        self.steps_by_accepted += np.bincount(accepted, minlength=self.toy.block + 1)
        self.steps_by_kept += np.bincount(kept, minlength=self.toy.block + 1)
        return accepted, token, drafts

    def draft(self, seeds: U64, anchor: I32, first: I32, step: I32) -> I32:
        """A block of drafts behind the anchor; the mask is not known to the draft model. [N, B]."""
        drafts = np.zeros((len(anchor), self.toy.block), np.int32)
        before = anchor
        for i in range(self.toy.block):
            u = self.numbers(seeds, first + np.int32(i), step, Purpose.DRAFT)
            drafts[:, i] = before = pick_many(self.toy.draft[before], u)
        return drafts

    def confidences(self, before: I32) -> F64:
        """c_i from y_i (y_0 = the anchor); before: [N, B+1]. [N, B]."""
        place = np.arange(self.toy.block)
        return self.toy.confidence[place, before[:, :-1]]

    def keep(self, before: I32) -> I32:
        """Drafts kept, by the engine's rules. before: [N, B+1] anchor and drafts."""
        survivals = self.survivals(before)
        if self.width == "fixed":
            return keep_fixed(survivals, np.array(self.thresholds[: self.toy.block], np.float32))
        if self.width == "adaptive":
            price = prices(lower_hull(self.times_ms), self.rate)
            return keep_fixed(survivals, price[1 : 1 + self.toy.block])
        return np.full(len(before), self.toy.block, np.int32)

    def survivals(self, before: I32) -> F32:
        """Of the drafts behind each anchor, by uncalibrated confidences. [N, B]."""
        raw = np.tile(sigmoid(KNOTS).astype(np.float32), (self.toy.block, 1))
        return survival(self.confidences(before).astype(np.float32), raw)

    def step_number(self, number: int) -> int:
        """`step` of the number-th decode step; the prefill has 0."""
        return number

    def numbers(self, seeds: U64, position: I32, step: I32, purpose: Purpose) -> F64:
        return uniform(seeds, position, step, purpose)

    def verify_numbers(self, seeds: U64, first: I32, step: I32, m: int) -> tuple[F64, F64]:
        return verify_draws(seeds, first, step, m)


def total_variation(answers: npt.NDArray[np.int32], exact: F64, vocab: int) -> float:
    """Distance of drawn answers [N, TOKENS] from the exact joint distribution."""
    index = answers.astype(np.int64) @ vocab ** np.arange(TOKENS - 1, -1, -1)
    seen = np.bincount(index, minlength=len(exact)) / len(answers)
    return float(np.abs(seen - exact).sum() / 2)


def variation_bound(exact: F64, draws: int, chance: float = 1e-7) -> float:
    """What the distance of `draws` honest draws exceeds with less than this chance.

    Mean distance (at most half the sum of the cells' standard deviations) + McDiarmid's bound of
    the deviation from it: a draw moves the distance by 1 / draws at most.
    """
    mean = np.sqrt(exact * (1 - exact) / draws).sum() / 2
    return float(mean + np.sqrt(np.log(1 / chance) / (2 * draws)))
