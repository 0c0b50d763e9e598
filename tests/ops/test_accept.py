"""The accepted drafts and the token behind them. Without drafts it is plain sampling: exact
choices to the bit, distributions by chi-square over fixed seeds.

A statistic may exceed its bound once in a million honest runs; the seeds are fixed, so it either
always does or never. That the test would see a wrong distribution is tested as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.asks import (
    DRAWS,
    Ask,
    arguments,
    draws,
    exact,
    final_logits,
    one_row_each,
    sample,
    token,
    words,
)
from helpers.chi_square import fits
from helpers.compare import assert_same_bits, assert_within
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_launch, io, scratch, state
from helpers.properties import examples
from ultraflash.graphs.draw import pick
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.sampling import TOP_LOGPROBS, distribution
from ultraflash.graphs.verify import block_verify, verify_draws

# --- distributions ---

UNEVEN = tuple(2.0 * math.sin(3.1 * t) + 0.02 * t for t in range(37))
FLAT = (0.25,) * 12
STEEP = (9.0, 6.0, 5.5, 0.0, -3.0, 2.0, 2.0, -40.0)

ASKS = {
    "plain": Ask(UNEVEN),
    "cold": Ask(UNEVEN, temperature=0.4),
    "hot": Ask(UNEVEN, temperature=3.0),
    "flat": Ask(FLAT),
    "steep": Ask(STEEP),
    "top_p": Ask(UNEVEN, top_p=0.8),
    "top_p_small": Ask(UNEVEN, top_p=0.05),
    "top_p_of_equals": Ask(FLAT, top_p=0.4),
    "top_k": Ask(UNEVEN, top_k=5),
    "top_k_of_equals": Ask(FLAT, top_k=5),
    "top_k_beyond": Ask(UNEVEN, top_k=1000),
    "top_k_then_top_p": Ask(UNEVEN, temperature=1.5, top_k=9, top_p=0.7),
    "bias": Ask(UNEVEN, bias=((3, 2.5), (20, -3.0), (36, 1.0))),
    "bias_kills": Ask(UNEVEN, bias=((8, -1e9),)),
    "mask": Ask(UNEVEN, forbidden=frozenset({0, 8, 31, 32, 36})),
    "mask_leaves_two": Ask(UNEVEN, forbidden=frozenset(range(37)) - {7, 33}),
    "banned": Ask(UNEVEN, banned=8),
    "everything": Ask(
        UNEVEN, 0.8, 0.9, 20, ((3, 2.5), (2, -1.0)), frozenset({8, 10, 14}), banned=12, seed=7
    ),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_distribution(ask: Ask) -> None:
    assert fits(draws(ask), exact(ask))


@pytest.mark.parametrize("vary", ["seed", "position", "step"])
def test_every_part_of_the_counter_gives_fresh_numbers(vary: str) -> None:
    ask = replace(ASKS["plain"], seed=2**63 + 5, position=77, step=3)
    assert fits(draws(ask, vary), exact(ask))


def test_neighbouring_draws_are_independent() -> None:
    """Tokens of positions p and p + 1 under one seed, jointly."""
    ask = Ask((0.0, 1.0, 0.5))
    rows = [np.repeat(a, DRAWS, axis=0) for a in arguments([ask])]
    rows[9] = np.arange(DRAWS, dtype=np.int32)
    tokens = one_row_each(*rows)[0]
    p = np.array(exact(ask))
    pairs = np.bincount(tokens[:-1:2] * 3 + tokens[1::2], minlength=9)
    assert fits(pairs, np.outer(p, p).reshape(-1))


@pytest.mark.parametrize(
    ("drawn", "believed"),
    [
        ("plain", Ask(UNEVEN, temperature=1.2)),
        ("top_p", Ask(UNEVEN, top_p=0.7)),
        ("top_k", Ask(UNEVEN, top_k=6)),
        ("mask", Ask(UNEVEN)),
        ("banned", Ask(UNEVEN)),
        ("bias", Ask(UNEVEN, bias=((3, 2.5), (20, -3.0)))),
        ("top_k_of_equals", Ask(FLAT, bias=((0, -99.0), (5, 0.0)), top_k=5)),
    ],
)
def test_the_test_sees_a_wrong_distribution(drawn: str, believed: Ask) -> None:
    assert not fits(draws(ASKS[drawn], count=3 * DRAWS), exact(believed))


# --- exact choices ---


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    assert token(Ask((1.0, 3.0, 2.0), temperature=0)) == 1
    assert token(Ask((1.0, 3.0, 3.0, 3.0), temperature=0)) == 1
    assert token(Ask((0.0, -0.0), temperature=0)) == 0
    assert token(Ask((-0.0, 0.0), temperature=0)) == 0


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_greedy_does_not_look_at_the_seed(seed: int) -> None:
    assert token(Ask(UNEVEN, temperature=0, seed=seed, position=seed % 1000)) == int(
        np.argmax(UNEVEN)
    )


def test_greedy_obeys_mask_bias_and_ban() -> None:
    logits = (5.0, 4.0, 3.0, 2.0)
    assert token(Ask(logits, temperature=0, forbidden=frozenset({0}))) == 1
    assert token(Ask(logits, temperature=0, banned=0)) == 1
    assert token(Ask(logits, temperature=0, bias=((3, 4.0),))) == 3
    assert token(Ask(logits, temperature=0, bias=((3, 99.0),), forbidden=frozenset({3}))) == 0
    assert token(Ask(logits, temperature=0, bias=((3, 99.0),), banned=3)) == 0


def test_a_bias_named_twice_counts_twice() -> None:
    assert token(Ask((5.0, 4.0), temperature=0, bias=((1, 0.6), (1, 0.6)))) == 1


@pytest.mark.parametrize("knob", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}])
def test_the_narrowest_choice_is_greedy(knob: dict[str, Any]) -> None:
    for seed in range(50):
        assert token(Ask(UNEVEN, temperature=2.0, seed=seed, **knob)) == int(np.argmax(UNEVEN))
        assert token(Ask(FLAT, seed=seed, **knob)) == 0


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy_without_a_warning(temperature: float) -> None:
    for seed in range(20):
        assert token(Ask((1.0, 3.0, 2.0, -1e4), temperature=temperature, seed=seed)) == 1


def test_a_huge_temperature_still_forbids() -> None:
    ask = Ask(UNEVEN, temperature=1e30, forbidden=frozenset(range(0, 37, 2)), banned=1)
    counts = draws(ask, count=2000)
    assert counts[::2].sum() == 0
    assert counts[1] == 0
    assert (counts[3::2] > 0).all()


@examples(200)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-300, 0.25, 1.0]), min_size=1, max_size=8),
    draw=st.one_of(st.sampled_from([2.0**-33, 1 - 2.0**-33]), st.floats(0.01, 0.99)),
)
def test_pick_never_returns_an_impossible_token(weights: list[float], draw: float) -> None:
    if sum(weights) == 0:
        weights[-1] = 1.0
    p = np.array(weights)
    p /= p.sum()
    chosen = pick(p, draw)
    assert p[chosen] > 0
    assert p[:chosen].sum() <= draw * p.sum() * (1 + 1e-12)


def test_pick_walks_ids_in_order() -> None:
    p = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    numbers = (2.0**-33, 0.2, 0.3, 0.74, 0.76, 1 - 2.0**-33)
    assert [pick(p, u) for u in numbers] == [1, 1, 3, 3, 4, 4]
    # On an edge the next possible token comes, and never the one in front of it.
    assert [pick(p, u) for u in (0.0, 0.25, 0.75)] == [1, 3, 4]


def test_idle_sequences_are_no_trouble() -> None:
    """Zeros everywhere, as the host leaves them."""
    ask = Ask((0.0,) * 40, temperature=0.0)
    assert sample(ask, ask)[0].tolist() == [0, 0]


# --- log-probabilities ---


def test_logprobs_are_those_of_the_constrained_logits_at_temperature_1() -> None:
    ask = Ask(UNEVEN, 0.5, 0.5, 3, ((3, 2.5),), frozenset({8, 30}), banned=12, want_logprobs=True)
    tokens, logprob, top_ids, top_logprobs = sample(ask)
    logits = final_logits(ask)
    total = math.log(math.fsum(math.exp(v) for v in logits))
    want = [v - total for v in logits]
    order = sorted(range(37), key=lambda t: (-want[t], t))[:TOP_LOGPROBS]
    assert top_ids[0].tolist() == order
    assert_within(top_logprobs[0], [want[t] for t in order], 1e-6)
    assert_within(logprob, [want[int(tokens[0])]], 1e-6)


def test_equal_logprobs_list_the_lower_id_first() -> None:
    _, _, top_ids, _ = sample(Ask(FLAT, want_logprobs=True))
    assert top_ids[0].tolist() == [*range(12), *[-1] * (TOP_LOGPROBS - 12)]


def test_a_small_vocabulary_leaves_places_empty() -> None:
    _, _, top_ids, top_logprobs = sample(Ask((1.0, 2.0, 0.5), want_logprobs=True))
    assert top_ids[0].tolist() == [1, 0, 2, *[-1] * 17]
    assert np.isneginf(top_logprobs[0, 3:]).all()


def test_forbidden_tokens_have_no_probability() -> None:
    ask = Ask((1.0, 2.0, 0.5), forbidden=frozenset({1}), want_logprobs=True)
    _, _, top_ids, top_logprobs = sample(ask)
    assert top_ids[0, :2].tolist() == [0, 2]
    assert top_logprobs[0, 2] == -np.inf


def test_logprobs_only_where_wanted() -> None:
    ask = Ask(UNEVEN)
    tokens, logprob, top_ids, top_logprobs = sample(ask, replace(ask, want_logprobs=True))
    assert tokens[0] == tokens[1]  # wanting them changes no token
    assert logprob[0] == 0
    assert (top_ids[0] == -1).all()
    assert np.isneginf(top_logprobs[0]).all()
    assert logprob[1] < 0


def test_types_and_shapes() -> None:
    tokens, logprob, top_ids, top_logprobs = sample(Ask(UNEVEN), Ask(UNEVEN))
    assert tokens.dtype == top_ids.dtype == np.int32
    assert logprob.dtype == top_logprobs.dtype == np.float32
    assert tokens.shape == logprob.shape == (2,)
    assert top_ids.shape == top_logprobs.shape == (2, TOP_LOGPROBS)


# --- neighbours ---


@every_choice
def test_rows_stand_alone(choice: Choice) -> None:
    asks = [
        replace(ask, seed=i, position=3 * i, step=i, want_logprobs=i % 2 == 0)
        for i, ask in enumerate(ASKS.values())
        if len(ask.logits) == 37
    ]
    assert_rows_alone(one_row_each, arguments(asks), choice)


def test_input_is_left_alone() -> None:
    """The logits are another node's result, read again by the host."""
    rows = arguments([ASKS["everything"]])
    before = [a.copy() for a in rows]
    one_row_each(*rows)
    for array, copy in zip(rows, before, strict=True):
        assert_same_bits(array, copy)


def op(rows: int, sequences: int) -> Accept:
    """The release's."""
    t, s = rows, sequences
    return Accept(
        scratch("logits", t, 129280, dtype="f32"), io("ids", t), io("slot", t), io("p", t),
        io("r", s + 1), state("q", 3, 5, 129280, dtype="f32"), io("mask", t, 4040, dtype="u32"),
        io("bi", s, 512), io("b", s, 512, dtype="f32"), io("ban", t),
        io("t", s, dtype="f32"), io("tp", s, dtype="f32"), io("tk", s),
        io("seed", s, dtype="u64"), io("st", s), io("w", s),
        io("acc", s), io("tok", s), io("lp", t, dtype="f32"), io("ti", t, 20),
        io("tl", t, 20, dtype="f32"),
    )  # fmt: skip


def test_launch() -> None:
    names = ("logits", "ids", "slot", "p", "r", "q", "mask", "bi", "b", "ban", "t", "tp", "tk",
             "seed", "st", "w", "acc", "tok", "lp", "ti", "tl")  # fmt: skip
    assert_launch(op(6, 1), "accept", names)


def test_cost_is_mostly_the_logits_and_the_distributions_of_the_drafts() -> None:
    nbytes = op(6, 1).cost().nbytes
    assert (6 + 5) * 4 * 129280 < nbytes < (6 + 5) * 4 * 129280 * 1.1


# --- drafts ---


@dataclass
class Block:
    """A step of two sequences: an idle one, and one that verifies drafts behind position 7."""

    drafts: tuple[int, ...]
    p: npt.NDArray[np.float64]  # [m+1, V] target
    q: npt.NDArray[np.float64]  # [m, V]
    seed: int = 3
    step: int = 5
    temperature: float = 1.0
    forbidden: tuple[int, ...] = ()
    known: bool = True  # what the drafts were drawn from
    size: int = 8  # of the block

    def run(self) -> tuple[int, int]:
        rows, vocab = self.p.shape
        bits = np.stack([words(vocab, frozenset({t}) if t >= 0 else frozenset())
                         for t in
                         (*self.forbidden, *[-1] * (rows - len(self.forbidden)))])  # fmt: skip
        kept = np.zeros((4, self.size, vocab), np.float32)
        kept[2, : rows - 1] = self.q[: self.size]
        accepted, token, *_ = Accept.reference(
            np.log(self.p).astype(np.float32), np.array([1, *self.drafts], np.int32),
            np.full(rows, 2, np.int32), np.arange(7, 7 + rows, dtype=np.int32),
            np.array([0, rows, rows], np.int32), kept if self.known else None, bits,
            np.full((2, 4), -1, np.int32), np.zeros((2, 4), np.float32),
            np.full(rows, -1, np.int32), np.full(2, self.temperature, np.float32),
            np.ones(2, np.float32), np.zeros(2, np.int32), np.full(2, self.seed, np.uint64),
            np.full(2, self.step, np.int32), np.zeros(2, np.int32),
        )  # fmt: skip
        assert accepted[1] == token[1] == 0
        return int(accepted[0]), int(token[0])


def random_block(rng: np.random.Generator, m: int, vocab: int = 5) -> Block:
    p, q = rng.dirichlet(np.ones(vocab), m + 1), rng.dirichlet(np.ones(vocab), m)
    drafts = tuple(int(rng.choice(vocab, p=row)) for row in q)
    return Block(drafts, p, q)


@pytest.mark.parametrize("m", range(8))
def test_accepts_what_block_verification_does(rng: np.random.Generator, m: int) -> None:
    """The keys of the random numbers, the slot's distributions and the rows are the right ones."""
    for seed in range(20):
        block = replace(random_block(rng, m), seed=seed)
        coins, last = verify_draws(
            np.array([seed], np.uint64), np.array([8], np.int32), np.array([5], np.int32), m
        )
        q = block.q.astype(np.float32).astype(np.float64)[None]
        p = np.stack([distribution(row, 1.0, 1.0, 0) for row in np.log(block.p).astype(np.float32)])
        drafts = np.array([block.drafts], np.int32).reshape(1, m)
        accepted, token = block_verify(p[None], q.reshape(1, m, 5), drafts, coins, last)
        assert block.run() == (accepted[0], token[0])


def test_drafts_of_unknown_origin_do_not_stay(rng: np.random.Generator) -> None:
    """The token behind them is drawn as if there were none; greedy choices need no origin."""
    for seed in range(20):
        block = replace(random_block(rng, 3), seed=seed, known=False)
        assert block.run() == Block((), block.p[:1], block.q[:0], seed=seed).run()
        greedy = replace(block, temperature=0.0)
        assert greedy.run() == replace(greedy, known=True).run()


def test_drafts_behind_the_block_that_was_kept_do_not_stay(rng: np.random.Generator) -> None:
    """They come from nothing known; those in front of them are verified as ever."""
    longer = 0
    for seed in range(40):
        block = replace(random_block(rng, 3), seed=seed)
        longer += block.run()[0] > 1
        assert replace(block, size=1).run()[0] <= 1
    assert longer, "with all of q more would have stayed"


def test_greedy_keeps_drafts_up_to_the_first_that_is_not_the_largest() -> None:
    p = np.full((4, 5), 0.1)
    p[range(4), [2, 3, 4, 1]] = 0.6
    q = np.full((3, 5), 0.2)
    wanted = {(2, 3, 4): (3, 1), (2, 3, 0): (2, 4), (2, 0, 4): (1, 3), (0, 3, 4): (0, 2)}
    for drafts, result in wanted.items():
        assert Block(drafts, p, q, temperature=0.0).run() == result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_draft_is_rejected_at_its_row(temperature: float) -> None:
    """Whatever the coins say, and it never comes out as the emitted token either."""
    p, q = np.full((3, 4), 0.25), np.full((2, 4), 0.25)
    for seed in range(100):
        accepted, token = Block(
            (2, 3), p, q, seed=seed, temperature=temperature, forbidden=(2,)
        ).run()
        assert accepted == 0
        assert token != 2
