"""Drafted tokens: q is what they are drawn from, bit for bit and by chi-square over fixed seeds.

The distribution itself is that of helpers/chances.py, plain Python, as in test_accept.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import pytest

from helpers.chances import biased, chances
from helpers.chi_square import fits
from helpers.compare import assert_same_bits, assert_within
from helpers.formats import F32
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, io, scratch, state
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.ops.draft_sample import DraftSample
from ultraflash.graphs.philox import Purpose, uniform
from ultraflash.graphs.sampling import distribution

I32 = npt.NDArray[np.int32]
DRAWS, SLOTS = 3_000, 3
UNTOUCHED = np.float32(0.125)
NO_DRAFT = -7


@dataclass(frozen=True)
class Ask:
    """One sequence's draft: block logits, correction, and how it samples. `at` is the block row's
    position."""

    logits: tuple[float, ...]
    markov: tuple[float, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    at: int = 0
    step: int = 0
    slot: int = 0

    @property
    def corrected(self) -> F32:
        markov = self.markov or (0.0,) * len(self.logits)
        return np.array(self.logits, np.float32) + np.array(markov, np.float32)

    @property
    def final(self) -> list[float]:
        return biased(self.corrected.tolist(), self.bias)

    @property
    def exact(self) -> list[float]:
        return chances(self.final, self.temperature, self.top_p, self.top_k)


def run(asks: list[Ask], index: int = 0, block: int = 2) -> tuple[I32, F32]:
    """drafts [S, B] and q [slots, B, V] after the call; other rows of the blocks are all NaN."""
    count, vocab = len(asks), len(asks[0].logits)
    logits = np.full((count, block, vocab), np.nan, np.float32)
    at, slot = np.full((count, block), -1, np.int32), np.zeros((count, block), np.int32)
    logits[:, index] = [ask.logits for ask in asks]
    at[:, index], slot[:, index] = [ask.at for ask in asks], [ask.slot for ask in asks]
    markov = np.array([ask.markov or (0.0,) * vocab for ask in asks], np.float32)
    bias_ids, bias = np.full((count, 4), -1, np.int32), np.zeros((count, 4), np.float32)
    for n, ask in enumerate(asks):
        for i, (token, value) in enumerate(ask.bias):
            bias_ids[n, i], bias[n, i] = token, value
    drafts = np.full((count, block), NO_DRAFT, np.int32)
    q = np.full((SLOTS, block, vocab), UNTOUCHED, np.float32)
    result = DraftSample.reference(
        logits.reshape(-1, vocab), markov, at.reshape(-1), slot.reshape(-1), bias_ids, bias,
        np.array([a.temperature for a in asks], np.float32),
        np.array([a.top_p for a in asks], np.float32),
        np.array([a.top_k for a in asks], np.int32), np.array([a.seed for a in asks], np.uint64),
        np.array([a.step for a in asks], np.int32), drafts, q, index, block,
    )  # fmt: skip
    assert result is None  # both are changed in place
    return drafts, q


def draft(ask: Ask) -> tuple[int, F32]:
    """The drafted token and the distribution kept for it."""
    drafts, q = run([ask])
    return int(drafts[0, 0]), q[ask.slot, 0]


UNEVEN = tuple(2.0 * math.sin(3.1 * t) + 0.02 * t for t in range(37))
SWAY = tuple(1.5 * math.cos(1.7 * t) for t in range(37))
FLAT = (0.25,) * 12
ASKS = {
    "plain": Ask(UNEVEN),
    "corrected": Ask(UNEVEN, SWAY),
    "cold": Ask(UNEVEN, SWAY, temperature=0.4),
    "hot": Ask(UNEVEN, SWAY, temperature=3.0),
    "top_p": Ask(UNEVEN, SWAY, top_p=0.8),
    "top_p_of_equals": Ask(FLAT, top_p=0.4),
    "top_k": Ask(UNEVEN, SWAY, top_k=5),
    "top_k_of_equals": Ask(FLAT, top_k=5),
    "bias": Ask(UNEVEN, SWAY, bias=((3, 2.5), (20, -3.0), (36, 1.0))),
    "everything": Ask(UNEVEN, SWAY, 0.8, 0.9, 20, ((3, 2.5), (2, -1.0)), 7, 40, 3, 2),
}
every_ask = pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())


# --- q ---


@every_ask
def test_q_is_what_the_request_asks_for(ask: Ask) -> None:
    """Bias, temperature, top_k, top_p of the corrected logits, rounded to float32."""
    _, q = draft(ask)
    assert q.dtype == np.float32
    assert_within(q, ask.exact, 2.0**-22)
    assert ((q == 0) == (np.array(ask.exact) == 0)).all()


@every_ask
def test_q_is_what_the_token_is_drawn_from(ask: Ask) -> None:
    """Not only near it: the first token at which the kept q adds up to more than the number."""
    for seed in range(60):
        token, q = draft(replace(ask, seed=seed))
        u = uniform(
            np.array([seed], np.uint64), np.array([ask.at + 1], np.int32),
            np.array([ask.step], np.int32), Purpose.DRAFT,
        )[0]  # fmt: skip
        reached = np.cumsum(q.astype(np.float64))
        assert token == int(np.argmax(reached > u * reached[-1]))


@every_ask
def test_tokens_are_distributed_as_q(ask: Ask) -> None:
    drafts, q = run([replace(ask, seed=ask.seed + n) for n in range(DRAWS)])
    kept = q[ask.slot, 0].astype(np.float64)
    assert fits(np.bincount(drafts[:, 0], minlength=len(kept)), kept / kept.sum())


@pytest.mark.parametrize("vary", ["at", "step"])
def test_every_part_of_the_counter_gives_fresh_numbers(vary: str) -> None:
    ask = Ask(UNEVEN, SWAY, seed=2**63 + 5, at=77, step=3)
    drafts, _ = run([replace(ask, **{vary: getattr(ask, vary) + n}) for n in range(DRAWS)])
    assert fits(np.bincount(drafts[:, 0], minlength=37), ask.exact)


@pytest.mark.parametrize(
    ("drawn", "believed"),
    [
        ("corrected", Ask(UNEVEN)),
        ("corrected", Ask(UNEVEN, SWAY, temperature=1.2)),
        ("top_p", Ask(UNEVEN, SWAY, top_p=0.7)),
        ("top_k", Ask(UNEVEN, SWAY, top_k=6)),
        ("bias", Ask(UNEVEN, SWAY)),
    ],
)
def test_the_test_sees_a_wrong_distribution(drawn: str, believed: Ask) -> None:
    drafts, _ = run([replace(ASKS[drawn], seed=n) for n in range(2 * DRAWS)])
    assert not fits(np.bincount(drafts[:, 0], minlength=37), believed.exact)


def test_neither_mask_nor_ban_shapes_q() -> None:
    """A forbidden draft is rejected at its row: what its successors may be is not known yet."""
    assert not {"mask", "banned"} & {f.name for f in fields(DraftSample)}


@pytest.mark.parametrize("index", range(5))
def test_only_the_place_of_this_draft_is_written(index: int) -> None:
    asks = [replace(ASKS["corrected"], slot=2, seed=4), Ask(SWAY, slot=0, at=9)]
    drafts, q = run(asks, index, 5)
    assert (np.delete(drafts, index, axis=1) == NO_DRAFT).all()
    assert (np.delete(q, index, axis=1) == UNTOUCHED).all()
    assert (q[1] == UNTOUCHED).all()
    for ask in asks:
        assert_within(q[ask.slot, index], ask.exact, 2.0**-22)


def test_the_draft_of_a_place_is_that_of_its_row() -> None:
    """Nothing depends on `index` but where a draft is found and put."""
    for ask in ASKS.values():
        want, q = draft(ask)
        for index in (1, 4):
            drafts, more = run([ask], index, 5)
            assert drafts[0, index] == want
            assert_same_bits(more[ask.slot, index], q)


def test_where_the_rounding_of_q_decides(rng: np.random.Generator) -> None:
    """Rare numbers fall between an edge of the exact distribution and one of the kept q."""
    ask = Ask(tuple(rng.normal(size=1 << 16).tolist()))
    _, q = draft(ask)
    p = distribution(ask.corrected, 1.0, 1.0, 0)
    count = 1 << 20
    seeds, zero = np.arange(count, dtype=np.uint64), np.zeros(count, np.int32)
    u = uniform(seeds, zero + np.int32(1), zero, Purpose.DRAFT)
    exact, kept = (np.cumsum(x.astype(np.float64)) for x in (p, q))
    differ = np.searchsorted(exact, u * exact[-1], "right") != np.searchsorted(
        kept, u * kept[-1], "right"
    )
    rare = np.flatnonzero(differ)
    assert 1 <= len(rare) <= 100
    for seed in rare[:4].tolist():
        token, _ = draft(replace(ask, seed=seed))
        assert token == np.searchsorted(kept, u[seed] * kept[-1], "right")


def test_a_token_too_unlikely_for_float32_is_never_drawn() -> None:
    """It has probability 0 in q, so verification could not weigh it."""
    ask = Ask((-120.0, 0.0, -200.0, 0.0, -300.0))
    for seed in range(100):
        token, q = draft(replace(ask, seed=seed))
        assert q[token] > 0
    assert q[[0, 2, 4]].tolist() == [0, 0, 0]


# --- the rule that q has to share with p ---


def verified(ask: Ask, drafts: list[int], q: F32) -> int:
    """How many drafts stay when the target has the draft's logits in every row. q: [B, V]."""
    rows, one = len(drafts) + 1, np.ones(1, np.float32)
    bias_ids, bias = np.full((1, 4), -1, np.int32), np.zeros((1, 4), np.float32)
    for i, (token, value) in enumerate(ask.bias):
        bias_ids[0, i], bias[0, i] = token, value
    accepted, *_ = Accept.reference(
        np.tile(ask.corrected, (rows, 1)), np.array([1, *drafts], np.int32),
        np.zeros(rows, np.int32), np.arange(20, 20 + rows, dtype=np.int32),
        np.array([0, rows], np.int32), q[None], np.full((rows, 2), 0xFFFFFFFF, np.uint32),
        bias_ids, bias, np.full(rows, -1, np.int32), one * np.float32(ask.temperature),
        one * np.float32(ask.top_p), np.array([ask.top_k], np.int32),
        np.array([ask.seed], np.uint64), np.ones(1, np.int32), np.zeros(1, np.int32),
    )  # fmt: skip
    return int(accepted[0])


@pytest.mark.parametrize("name", [name for name, ask in ASKS.items() if len(ask.logits) == 37])
def test_a_draft_from_the_targets_own_logits_always_stays(name: str) -> None:
    """q shaped otherwise than p, or kept otherwise than drawn, would be rejected now and then."""
    for seed in range(40):
        ask = replace(ASKS[name], slot=0, seed=seed, step=0)
        found = [run([replace(ask, at=20 + i)], i, 3) for i in range(3)]
        drafts = [int(tokens[0, i]) for i, (tokens, _) in enumerate(found)]
        assert verified(ask, drafts, np.stack([q[0, i] for i, (_, q) in enumerate(found)])) == 3


# --- temperature 0 ---


def test_greedy_takes_the_largest_and_the_lower_id_of_equals() -> None:
    zero = {"temperature": 0.0}
    assert run([Ask((1.0, 3.0, 2.0), **zero)])[0][0, 0] == 1  # type: ignore[arg-type]
    assert run([Ask((1.0, 3.0, 3.0), **zero)])[0][0, 0] == 1  # type: ignore[arg-type]
    assert run([Ask((1.0, 3.0, 2.0), (0.0, 0.0, 1.5), **zero)])[0][0, 0] == 2  # type: ignore[arg-type]
    assert run([Ask((1.0, 3.0, 2.0), bias=((0, 9.0),), **zero)])[0][0, 0] == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_greedy_leaves_q_alone_and_does_not_look_at_chance(seed: int) -> None:
    ask = Ask(UNEVEN, SWAY, temperature=0.0, seed=seed, at=seed % 999, step=seed % 77)
    drafts, q = run([replace(ask, top_k=3), replace(ask, top_p=0.5)])
    assert (q == UNTOUCHED).all()
    assert drafts[:, 0].tolist() == [int(np.argmax(ask.corrected))] * 2


def test_greedy_beside_sampling() -> None:
    """Each sequence by its own temperature."""
    asks = [ASKS["hot"], replace(ASKS["hot"], temperature=0.0, slot=1)]
    drafts, q = run(asks)
    assert drafts[1, 0] == int(np.argmax(asks[1].corrected))
    assert (q[1] == UNTOUCHED).all()
    assert_same_bits(q[0, 0], draft(asks[0])[1])


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_a_tiny_temperature_is_greedy_without_a_warning(temperature: float) -> None:
    for seed in range(20):
        token, q = draft(Ask((1.0, 3.0, 2.0, -1e4), temperature=temperature, seed=seed))
        assert (token, q.tolist()) == (1, [0, 1, 0, 0])


# --- neighbours ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_idle_sequences_touch_no_slot(temperature: float) -> None:
    """Slot -1 must not be read as the last slot; the draft is some token of the vocabulary."""
    drafts, q = run([Ask(UNEVEN, slot=-1, temperature=temperature), Ask(SWAY, slot=1)])
    assert 0 <= drafts[0, 0] < 37
    assert (q[[0, 2]] == UNTOUCHED).all()


@every_choice
def test_sequences_stand_alone(choice: Choice) -> None:
    asks = [a for a in ASKS.values() if len(a.logits) == 37]
    asks += [replace(asks[0], temperature=0.0), replace(asks[1], slot=-1)]
    asks = [replace(a, seed=n, at=3 * n, step=n) for n, a in enumerate(asks)]

    def tokens(rows: npt.NDArray[np.intp]) -> I32:
        return run([asks[n] for n in rows])[0]

    assert_rows_alone(tokens, [np.arange(len(asks))], choice)


def test_inputs_are_left_alone() -> None:
    """Logits are another node's result, read again for the next draft."""
    logits, markov = np.array([UNEVEN, UNEVEN], np.float32), np.array([SWAY], np.float32)
    before = logits.copy(), markov.copy()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.int32)
    bias_ids, bias = np.array([[3]], np.int32), np.array([[2.0]], np.float32)
    DraftSample.reference(
        logits, markov, np.zeros(2, np.int32), np.zeros(2, np.int32), bias_ids, bias, one, one,
        zero, np.zeros(1, np.uint64), zero, np.zeros((1, 2), np.int32),
        np.zeros((1, 2, 37), np.float32), 1, 2,
    )  # fmt: skip
    assert_same_bits(logits, before[0])
    assert_same_bits(markov, before[1])


def op(sequences: int) -> DraftSample:
    """The release's."""
    s, rows = sequences, 5 * sequences
    return DraftSample(
        scratch("logits", rows, 129280, dtype="f32"), scratch("markov", s, 129280, dtype="f32"),
        scratch("at", rows, dtype="i32"), scratch("slot", rows, dtype="i32"),
        io("bi", s, 512), io("b", s, 512, dtype="f32"), io("t", s, dtype="f32"),
        io("tp", s, dtype="f32"), io("tk", s), io("seed", s, dtype="u64"), io("st", s),
        io("d", s, 5), state("q", 3, 5, 129280, dtype="f32"), 2, 5,
    )  # fmt: skip


def test_launch() -> None:
    names = ("logits", "markov", "at", "slot", "bi", "b", "t", "tp", "tk", "seed", "st", "d", "q")
    assert_launch(op(2), "draft_sample", names, index=2, block=5)


@pytest.mark.parametrize("sequences", [1, 3])
def test_cost_counts_one_draft_of_each_sequence(sequences: int) -> None:
    """Logits, correction and q of one row; at, slot, draft; bias and settings."""
    row = 3 * 4 * 129280 + 3 * 4 + 512 * 8 + 4 * 4 + 8
    assert_cost(op(sequences), sequences * row)
