"""The sampled token: exact choices to the bit, distributions by chi-square over fixed seeds.

`exact` below is the distribution of architecture.md section 5 in plain Python: bias, mask and ban,
then temperature, top_k, top_p. A statistic may exceed its bound once in a million honest runs; the
seeds are fixed, so it either always does or never. That the test would see a wrong distribution is
tested as well.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.compare import assert_same_bits, assert_within
from helpers.formats import F32
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_launch, io, scratch
from helpers.properties import examples
from helpers.statistics import fits
from ultraflash.graphs.draw import pick
from ultraflash.graphs.ops.sample import TOP_LOGPROBS, Sample

DRAWS = 12_000
INF = math.inf


@dataclass(frozen=True)
class Ask:
    """What one sequence asks for."""

    logits: tuple[float, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    forbidden: frozenset[int] = frozenset()
    banned: int = -1
    seed: int = 0
    position: int = 0
    step: int = 0
    want_logprobs: bool = False


def final_logits(ask: Ask) -> list[float]:
    """With bias, mask and ban, as float32."""
    out = [np.float32(v) for v in ask.logits]
    for token, value in ask.bias:
        out[token] = np.float32(out[token] + np.float32(value))
    gone = ask.forbidden | {ask.banned}
    return [-INF if t in gone else float(v) for t, v in enumerate(out)]


def exact(ask: Ask) -> list[float]:
    """The distribution of the token, temperature > 0."""
    logits = final_logits(ask)
    peak = max(logits)
    temperature = float(np.float32(ask.temperature))
    p = [math.exp((v - peak) / temperature) for v in logits]
    order = sorted(range(len(p)), key=lambda t: (-p[t], t))
    if ask.top_k:
        order = order[: ask.top_k]
    if ask.top_p < 1:
        total, reached, kept = math.fsum(p[t] for t in order), 0.0, 0
        while reached < float(np.float32(ask.top_p)) * total:
            reached += p[order[kept]]
            kept += 1
        order = order[: max(kept, 1)]
    total = math.fsum(p[t] for t in order)
    return [p[t] / total if t in order else 0.0 for t in range(len(p))]


def words(size: int, forbidden: frozenset[int]) -> npt.NDArray[np.uint32]:
    """One bit a token, set where it is allowed; bits behind the vocabulary are set as well."""
    mask = [0xFFFFFFFF] * -(-size // 32)
    for token in forbidden:
        mask[token // 32] &= ~(1 << token % 32)
    return np.array(mask, np.uint32)


def arguments(asks: list[Ask], biases: int = 4) -> list[npt.NDArray[Any]]:
    """The arrays of Sample.reference, one row a sequence."""
    bias_ids, bias = np.full((len(asks), biases), -1, np.int32), np.zeros((len(asks), biases))
    for row, ask in enumerate(asks):
        for i, (token, value) in enumerate(ask.bias):
            bias_ids[row, i], bias[row, i] = token, value

    def column(name: str, dtype: type) -> npt.NDArray[Any]:
        return np.array([getattr(ask, name) for ask in asks], dtype)

    return [
        column("logits", np.float32), np.stack([words(len(a.logits), a.forbidden) for a in asks]),
        bias_ids, bias.astype(np.float32), column("banned", np.int32),
        column("temperature", np.float32), column("top_p", np.float32), column("top_k", np.int32),
        column("seed", np.uint64), column("position", np.int32), column("step", np.int32),
        column("want_logprobs", np.int32),
    ]  # fmt: skip


def sample(*asks: Ask) -> tuple[npt.NDArray[np.int32], F32, npt.NDArray[np.int32], F32]:
    return Sample.reference(*arguments(list(asks)))


def token(ask: Ask) -> int:
    return int(sample(ask)[0][0])


@functools.cache
def draws(ask: Ask, vary: str = "seed", count: int = DRAWS) -> npt.NDArray[np.intp]:
    """How often each token comes when only `vary` changes."""
    rows = arguments([ask])
    many = [np.repeat(a, count, axis=0) for a in rows]
    index = {"seed": 8, "position": 9, "step": 10}[vary]
    many[index] = np.arange(count).astype(rows[index].dtype) + rows[index]
    tokens = Sample.reference(*many)[0]
    return np.bincount(tokens, minlength=len(ask.logits))


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
    tokens = Sample.reference(*rows)[0]
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
    assert not fits(draws(ASKS[drawn]), exact(believed))


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
    assert_rows_alone(Sample.reference, arguments(asks), choice)


def test_input_is_left_alone() -> None:
    """The logits are another node's result, read again by the host."""
    rows = arguments([ASKS["everything"]])
    before = [a.copy() for a in rows]
    Sample.reference(*rows)
    for array, copy in zip(rows, before, strict=True):
        assert_same_bits(array, copy)


def op(sequences: int) -> Sample:
    """The release's."""
    s = sequences
    return Sample(
        scratch("logits", s, 129280, dtype="f32"), scratch("mask", s, 4040, dtype="u32"),
        io("bi", s, 512), io("b", s, 512, dtype="f32"), io("ban", s),
        io("t", s, dtype="f32"), io("tp", s, dtype="f32"), io("tk", s),
        io("seed", s, dtype="u64"), io("p", s), io("st", s), io("w", s),
        io("tok", s), io("lp", s, dtype="f32"), io("ti", s, 20), io("tl", s, 20, dtype="f32"),
    )  # fmt: skip


def test_launch() -> None:
    names = ("logits", "mask", "bi", "b", "ban", "t", "tp", "tk", "seed", "p", "st", "w",
             "tok", "lp", "ti", "tl")  # fmt: skip
    assert_launch(op(2), "sample", names)


def test_cost_is_mostly_the_logits() -> None:
    nbytes = op(2).cost().nbytes
    assert 2 * 4 * 129280 < nbytes < 2 * 4 * 129280 * 1.1
