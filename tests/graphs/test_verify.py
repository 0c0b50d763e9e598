"""Verification, exactly: every block of drafts of tiny models, and an independent scalar copy in
fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.properties import examples
from helpers.verify_tree import Tree, answers
from ultraflash.graphs.draw import pick, pick_many
from ultraflash.graphs.numerics import F64
from ultraflash.graphs.philox import Purpose, uniform
from ultraflash.graphs.rows import I32
from ultraflash.graphs.verify import (
    block_reach,
    block_verify,
    greedy_verify,
    token_verify,
    verify_draws,
)

RULES = {"block": block_verify, "token": token_verify}
both_rules = pytest.mark.parametrize("rule", RULES)
I64 = npt.NDArray[np.int64]


def distributions(weights: I64) -> F64:
    """Rows of small integers as probabilities; a row of zeros puts everything on token 0."""
    weights = weights.copy()
    weights[weights.sum(axis=1) == 0, 0] = 1
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    vocab, m = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    nodes = sum(vocab**i for i in range(m + 1))
    ends = np.cumsum([vocab**i for i in range(m + 1)])[:-1]

    def model() -> list[F64]:
        small = hnp.arrays(np.int64, (nodes, vocab), elements=st.integers(0, 4))
        return np.split(distributions(draw(small)), ends)

    return Tree(model(), model()[:m])


@st.composite
def trees_and_widths(draw: st.DrawFn) -> tuple[Tree, list[int]]:
    """A tree and a stopping rule: behind each prefix of drafts, stop or go on."""
    tree = draw(trees())
    stops = [
        draw(hnp.arrays(np.bool_, tree.vocab**i, elements=st.booleans())) for i in range(tree.m)
    ]
    stopped = np.stack(
        [stops[i][tree.prefix(i)] for i in range(tree.m)] + [np.ones(len(tree.drafts), np.bool_)],
        axis=1,
    )
    return tree, stopped.argmax(axis=1).tolist()


@both_rules
@examples(150)
@given(case=trees_and_widths())
def test_the_text_is_the_targets_under_any_stopping_rule(
    rule: str, case: tuple[Tree, list[int]]
) -> None:
    tree, kept = case
    np.testing.assert_allclose(answers(tree, rule, kept), tree.target, rtol=0, atol=1e-12)


@examples(150)
@given(case=trees_and_widths())
def test_block_verification_accepts_at_least_as_much_as_token_wise(
    case: tuple[Tree, list[int]],
) -> None:
    tree, kept = case
    block, token = (tree.expected_accepted(rule, kept) for rule in RULES)
    assert block >= token - 1e-12


def test_block_verification_accepts_more_where_a_later_draft_makes_up_for_an_earlier() -> None:
    # The paper's example: the first draft is too likely, the second not likely enough.
    p, q = np.array([[1 / 3, 2 / 3]]), np.array([[2 / 3, 1 / 3]])
    tree = Tree([p, np.repeat(p, 2, 0), np.repeat(p, 4, 0)], [q, np.repeat(q, 2, 0)])
    everything = [2] * 4
    assert tree.expected_accepted("token", everything) == pytest.approx(10 / 9)
    assert tree.expected_accepted("block", everything) == pytest.approx(11 / 9)


@both_rules
def test_a_width_that_looks_at_the_draft_it_decides_on_changes_the_text(rule: str) -> None:
    p, q = np.array([[0.5, 0.5]]), np.array([[0.5, 0.5]])
    tree = Tree([p, np.repeat(p, 2, 0)], [q])
    keep_only_token_1 = [0, 1]
    got = answers(tree, rule, keep_only_token_1)
    assert np.abs(got - tree.target).sum() / 2 == pytest.approx(0.25)


@st.composite
def steps(draw: st.DrawFn) -> tuple[I64, I64, I32, F64, F64, I32]:
    """Weights of p and q, drafts that q can make, numbers and widths of a few sequences."""
    count, m, vocab = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    p, q = rng.integers(0, 5, (count, m + 1, vocab)), rng.integers(0, 5, (count, m, vocab))
    drafts = rng.integers(0, vocab, (count, m), dtype=np.int32)
    q[np.arange(count)[:, None], np.arange(m), drafts] += 1
    p[..., 0] += p.sum(axis=2) == 0
    kept = draw(hnp.arrays(np.int32, count, elements=st.integers(0, m)))
    return p, q, drafts, rng.random((count, m)), rng.random(count), kept


def in_fractions(
    rule: str, p: I64, q: I64, drafts: I32, accept_u: F64, last_u: float, kept: int
) -> tuple[int, int, Fraction]:
    """One sequence by the papers' text; also how near a number came to where the result turns."""

    def exact(weights: I64) -> list[Fraction]:
        return [Fraction(int(w), int(weights.sum())) for w in weights]

    def rest(i: int, scale: Fraction) -> list[Fraction]:
        rows = zip(exact(p[i]), exact(q[i]), strict=True)
        return [max(scale * a - b, Fraction(0)) for a, b in rows]

    reach, accepted, near = [Fraction(1)], 0, Fraction(1)
    for i in range(kept):
        ratio = exact(p[i])[drafts[i]] / exact(q[i])[drafts[i]]
        reach.append(min(reach[-1] * ratio, Fraction(1)) if rule == "block" else Fraction(1))
        chance = min(ratio, Fraction(1))
        if rule == "block":
            chance = reach[-1]
            if i + 1 < kept:
                mass = sum(rest(i + 1, reach[-1]))
                lost = mass + 1 - reach[-1]
                chance = mass / lost if lost else Fraction(1)
        u = Fraction(float(accept_u[i]))
        near = min(near, abs(u - chance))
        if u <= chance and (rule == "block" or accepted == i):
            accepted = i + 1
    weights = exact(p[accepted]) if accepted == kept else rest(accepted, reach[accepted])
    weights = weights if sum(weights) else exact(p[accepted])
    goal, total, token = Fraction(last_u) * sum(weights), Fraction(0), -1
    for x, weight in enumerate(weights):
        total += weight
        near = min(near, abs(total - goal))
        if total > goal and token < 0:
            token = x
    return accepted, token, near


@both_rules
@examples(250)
@given(case=steps())
def test_it_is_the_papers_algorithm(rule: str, case: tuple[I64, I64, I32, F64, F64, I32]) -> None:
    p, q, drafts, accept_u, last_u, kept = case
    count, m, vocab = len(p), q.shape[1], p.shape[2]
    got = RULES[rule](
        distributions(p.reshape(-1, vocab)).reshape(p.shape),
        distributions(q.reshape(-1, vocab)).reshape(count, m, vocab),
        drafts,
        accept_u,
        last_u,
        kept,
    )
    for s in range(count):
        accepted, token, near = in_fractions(
            rule, p[s], q[s], drafts[s], accept_u[s], float(last_u[s]), int(kept[s])
        )
        if near > Fraction(1, 10**12):  # else rounding may turn it either way
            assert (got[0][s], got[1][s]) == (accepted, token)


@both_rules
@examples(120)
@given(case=steps())
def test_what_lies_behind_the_width_or_a_forbidden_draft_is_not_looked_at(
    rule: str, case: tuple[I64, I64, I32, F64, F64, I32]
) -> None:
    weights_p, weights_q, drafts, accept_u, last_u, kept = case
    count, m, vocab = len(weights_p), weights_q.shape[1], weights_p.shape[2]
    p = distributions(weights_p.reshape(-1, vocab)).reshape(weights_p.shape)
    q = distributions(weights_q.reshape(-1, vocab)).reshape(count, m, vocab)
    verify = RULES[rule]
    accepted, token = verify(p, q, drafts, accept_u, last_u, kept)
    assert accepted.dtype == token.dtype == np.int32
    assert (accepted <= kept).all()

    poisoned, other = p.copy(), q.copy()
    for s in range(count):
        forbidden = [i for i in range(kept[s]) if p[s, i, drafts[s, i]] == 0]
        if forbidden:
            assert accepted[s] <= forbidden[0], "a forbidden draft was accepted"
        assert p[s, accepted[s], token[s]] > 0, "a forbidden token was emitted"
        poisoned[s, min([*forbidden, kept[s]]) + 1 :] = np.nan
        other[s, kept[s] :] = np.nan
    again = verify(poisoned, other, drafts, accept_u, last_u, kept)
    np.testing.assert_array_equal(again, (accepted, token))


@both_rules
def test_a_draft_model_that_equals_the_target_is_always_accepted(
    rule: str, rng: np.random.Generator
) -> None:
    p = rng.dirichlet(np.ones(50), (200, 6))
    drafts = pick_many(p[:, :5].reshape(-1, 50), rng.random(1000)).reshape(200, 5)
    accepted, _ = RULES[rule](p, p[:, :5], drafts, rng.random((200, 5)), rng.random(200))
    assert (accepted == 5).all()


@both_rules
def test_no_draft_is_plain_sampling(rule: str, rng: np.random.Generator) -> None:
    p, u = rng.dirichlet(np.ones(30), (100, 1)), rng.random(100)
    accepted, token = RULES[rule](
        p, np.zeros((100, 0, 30)), np.zeros((100, 0), np.int32), np.zeros((100, 0)), u
    )
    assert (accepted == 0).all()
    np.testing.assert_array_equal(token, pick_many(p[:, 0], u))


@both_rules
def test_a_rest_that_rounding_emptied_falls_back_to_the_target(rule: str) -> None:
    p = np.array([[[0.25, 0.75], [0.5, 0.5]]])
    q = np.nextafter(p[:, :1], 1)  # a hair above p everywhere: nothing is left of p
    for u, token in ((0.2, 0), (0.3, 1)):
        got = RULES[rule](
            p, q, np.zeros((1, 1), np.int32), np.full((1, 1), 1 - 2.0**-53), np.array([u])
        )
        assert (got[0][0], got[1][0]) == (0, token)


@both_rules
def test_vanishing_probabilities_do_not_overflow(rule: str) -> None:
    p = np.array([[[1.0, 0.0], [0.5, 0.5]]])
    q = np.array([[[5e-324, 1.0]]])
    got = RULES[rule](p, q, np.zeros((1, 1), np.int32), np.full((1, 1), 0.999), np.array([0.7]))
    assert (got[0][0], got[1][0]) == (1, 1)


def test_mass_lost_early_can_be_made_up_for_but_not_after_a_forbidden_draft() -> None:
    p = np.array([[[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]]] * 2)
    q = np.array([[[0.4, 0.6], [0.3, 0.7]]] * 2)
    p[1, 0] = 0, 1
    drafts = np.zeros((2, 2), np.int32)
    reach = block_reach(p, q, drafts, np.array([2, 2], np.int32))
    np.testing.assert_allclose(reach, np.array([[1.0, 0.5, 1.0], [1.0, 0.0, 0.0]]))


@both_rules
def test_the_emitted_tokens_number_is_the_one_of_its_position(
    rule: str, rng: np.random.Generator
) -> None:
    p, q = rng.dirichlet(np.ones(5), (300, 4)), rng.dirichlet(np.ones(5), (300, 3))
    drafts = pick_many(q.reshape(-1, 5), rng.random(900)).reshape(300, 3)
    accept_u, last_u = rng.random((300, 3)), rng.random((300, 4))
    accepted, token = RULES[rule](p, q, drafts, accept_u, last_u)
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    chosen = last_u[np.arange(300), accepted]
    np.testing.assert_array_equal((accepted, token), RULES[rule](p, q, drafts, accept_u, chosen))


def test_numbers_are_keyed_by_position_step_and_purpose() -> None:
    seed, first = np.array([3, 2**64 - 1], np.uint64), np.array([100, 7], np.int32)
    step = np.array([1, 12], np.int32)
    accept_u, last_u = verify_draws(seed, first, step, 2)
    for i in range(3):
        position = first + np.int32(i)
        np.testing.assert_array_equal(last_u[:, i], uniform(seed, position, step, Purpose.RESIDUAL))
        if i < 2:
            np.testing.assert_array_equal(
                accept_u[:, i], uniform(seed, position, step, Purpose.ACCEPT)
            )
    assert len(np.unique(np.concatenate([accept_u, last_u], axis=1))) == 10


@examples(120)
@given(data=st.data(), count=st.integers(1, 4), m=st.integers(0, 5), vocab=st.integers(2, 3))
def test_greedy_keeps_drafts_while_they_are_the_best(
    data: st.DataObject, count: int, m: int, vocab: int
) -> None:
    ids = st.integers(0, vocab - 1)
    best = data.draw(hnp.arrays(np.int32, (count, m + 1), elements=ids))
    drafts = data.draw(hnp.arrays(np.int32, (count, m), elements=ids))
    kept = data.draw(hnp.arrays(np.int32, count, elements=st.integers(0, m)))
    accepted, token = greedy_verify(best, drafts, kept)
    for s in range(count):
        want = 0
        while want < kept[s] and drafts[s, want] == best[s, want]:
            want += 1
        assert (accepted[s], token[s]) == (want, best[s, want])
    full = greedy_verify(best, drafts)
    np.testing.assert_array_equal(full, greedy_verify(best, drafts, np.full(count, m, np.int32)))


@examples(300)
@given(
    weights=hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 4), st.integers(1, 40)),
        elements=st.sampled_from([0.0, 0.1, 0.3, 1 / 3, 1e-9, 2.5]),
    ),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_token_is_the_inverse_distribution_function(weights: F64, u: float) -> None:
    weights[weights.sum(axis=1) == 0, -1] = 1
    token = pick_many(weights, np.full(len(weights), u))
    for row, got in zip(weights, token, strict=True):
        cumulative = np.cumsum(row)
        assert got == np.searchsorted(cumulative, u * cumulative[-1], side="right")
        assert got == pick(row, u)
        assert row[got] > 0
