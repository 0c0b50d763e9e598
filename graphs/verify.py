"""Which drafts survive, and the token behind them (architecture.md section 5).

Pure functions of probabilities and uniform numbers, vectorised over sequences; no plan, no state.
`block_verify` is what the engine runs, `token_verify` the rule that it is compared with,
`greedy_verify` the argmax rule of temperature 0, which divides by nothing.

Row i of `p` is the target's distribution behind the anchor and the first i drafts; row i of `q` is
the distribution that draft i was really drawn from. Both are taken after temperature, top_p, top_k
and bias. A token mask belongs into p at least: where p is 0, the draft is rejected at its row and
the residual is that of the masked p against the real q. Dropping such a draft before verifying
would condition the text on what the draft model happened to say. Rows behind a draft of probability
0 may hold anything, NaN included.

`kept` [S] lets sequences of one step verify different numbers of drafts: drafts, q rows and p rows
behind `kept` are not looked at. It must have been chosen by a stopping rule: whether draft i stays
may depend on drafts before i only (runtime/width.py).

Random numbers (`verify_draws`), Philox of the request's seed:
    acceptance of a draft   (position at which the draft would stand, step, ACCEPT)
    emitted token           (position of the emitted token, step, RESIDUAL)
Both must differ from every number of an earlier step: block verification looks at draws behind the
prefix that it accepts, so that a number used again at its position in the next step biases the
text. `step` therefore counts a request's decode steps from 1, and 0 is the prefill, whose drafts
the first decode step verifies.
"""

from __future__ import annotations

import numpy as np

from ultraflash.graphs.draw import pick_many
from ultraflash.graphs.numerics import F64
from ultraflash.graphs.philox import U64, Purpose, uniform
from ultraflash.graphs.rows import I32


def block_verify(
    p: F64, q: F64, drafts: I32, accept_u: F64, last_u: F64, kept: I32 | None = None
) -> tuple[I32, I32]:
    """Block verification: drafts accepted, and the token that follows them, per sequence.

    Shapes:
        p: [S, m+1, V]; q: [S, m, V]; drafts: [S, m]; accept_u: [S, m]; last_u: [S], or [S, m+1]
        with one number for each possible count of accepted drafts; kept: [S] drafts to verify, all
        m by default; result: [S], [S]. m = 0 samples from p.
    Source: arXiv 2403.10444, algorithm 2.
    """
    kept = _all_kept(drafts) if kept is None else kept
    reach = block_reach(p, q, drafts, kept)
    passed = accept_u < block_chances(p, q, reach, kept)
    behind = np.arange(1, drafts.shape[1] + 1)
    accepted: I32 = np.where(passed, behind, 0).max(axis=1, initial=0).astype(np.int32)
    scale = reach[np.arange(len(p)), accepted]
    return accepted, _emit(p, q, accepted, kept, scale, last_u)


def token_verify(
    p: F64, q: F64, drafts: I32, accept_u: F64, last_u: F64, kept: I32 | None = None
) -> tuple[I32, I32]:
    """Token-wise rejection: each draft stays with probability min(1, p/q), up to the first that
    does not.

    Shapes: as `block_verify`. Source: arXiv 2211.17192, algorithm 1.
    """
    kept = _all_kept(drafts) if kept is None else kept
    passed = accept_u < token_chances(p, q, drafts, kept)
    accepted = np.logical_and.accumulate(passed, axis=1).sum(axis=1, dtype=np.int32)
    return accepted, _emit(p, q, accepted, kept, np.ones(len(p)), last_u)


def greedy_verify(best: I32, drafts: I32, kept: I32 | None = None) -> tuple[I32, I32]:
    """Argmax rule: drafts stay while they equal the target's best token; then that token follows.

    Shapes:
        best: [S, m+1] largest allowed logit of each row; drafts: [S, m]; kept: [S]; result: [S],
        [S].
    """
    kept = _all_kept(drafts) if kept is None else kept
    m = drafts.shape[1]
    same = (drafts == best[:, :m]) & (np.arange(m) < kept[:, None])
    accepted = np.logical_and.accumulate(same, axis=1).sum(axis=1, dtype=np.int32)
    return accepted, best[np.arange(len(best)), accepted]


def verify_draws(seed: U64, first: I32, step: I32, m: int) -> tuple[F64, F64]:
    """The numbers of a step's verification: accept_u [S, m], last_u [S, m+1].

    seed, first, step: [S]; `first` is the position of the first draft, the one behind the anchor.
    """

    def numbers(count: int, purpose: Purpose) -> F64:
        position = (first[:, None] + np.arange(count)).astype(np.int32).ravel()
        flat = uniform(np.repeat(seed, count), position, np.repeat(step, count), purpose)
        return flat.reshape(len(seed), count)

    return numbers(m, Purpose.ACCEPT), numbers(m + 1, Purpose.RESIDUAL)


def block_reach(p: F64, q: F64, drafts: I32, kept: I32) -> F64:
    """P_0 .. P_m of algorithm 2: how much of the target's mass the drafts so far can carry. [S,
    m+1].

    0 behind `kept` and from the first draft with p = 0 on.
    """
    every = np.arange(len(p))
    reach = np.zeros((len(p), drafts.shape[1] + 1))
    reach[:, 0] = 1
    for i in range(drafts.shape[1]):
        alive = (reach[:, i] > 0) & (i < kept)
        wanted = np.where(alive, reach[:, i] * p[every, i, drafts[:, i]], 0)
        drawn = q[every, i, drafts[:, i]]
        reach[:, i + 1] = _share(wanted, drawn)
    return reach


def block_chances(p: F64, q: F64, reach: F64, kept: I32) -> F64:
    """h_1 .. h_m of algorithm 2: the chance that a prefix passes by itself. [S, m]."""
    m = reach.shape[1] - 1
    chance = np.zeros((len(p), m))
    for i in range(1, m):
        mass = _rest(p[:, i], q[:, i], reach[:, i]).sum(axis=1)
        lost = 1 - reach[:, i]
        # No mass and nothing lost: p equals q here, the prefix is as good as drawn from p.
        chance[:, i - 1] = np.divide(mass, mass + lost, where=mass + lost > 0, out=np.ones(len(p)))
    at = np.arange(1, m + 1)
    chance = np.where(at == kept[:, None], reach[:, 1:], chance)
    return np.where(at > kept[:, None], 0, chance)


def token_chances(p: F64, q: F64, drafts: I32, kept: I32) -> F64:
    """The chance of each draft to be accepted, given that all before it were. [S, m]."""
    m = drafts.shape[1]
    wanted = np.take_along_axis(p[:, :m], drafts[..., None], axis=2)[..., 0]
    drawn = np.take_along_axis(q, drafts[..., None], axis=2)[..., 0]
    return np.where(np.arange(m) < kept[:, None], _share(wanted, drawn), 0)


def remainder(p: F64, q: F64, accepted: I32, kept: I32, scale: F64) -> F64:
    """Weights of the emitted token: the last row's p, or what the draft left of it. [S, V].

    `scale` [S] is P_tau for block verification, 1 for token-wise. Where rounding leaves nothing, p
    and q were equal, and p itself is the limit.
    """
    every = np.arange(len(p))
    row = p[every, accepted]
    if not q.shape[1]:
        return row
    left = _rest(row, q[every, np.minimum(accepted, q.shape[1] - 1)], scale)
    whole = (accepted == kept) | (left.sum(axis=1) <= 0)
    return np.where(whole[:, None], row, left)


def _emit(p: F64, q: F64, accepted: I32, kept: I32, scale: F64, last_u: F64) -> I32:
    u = last_u if last_u.ndim == 1 else last_u[np.arange(len(p)), accepted]
    return pick_many(remainder(p, q, accepted, kept, scale), u)


def _share(wanted: F64, drawn: F64) -> F64:
    """min(wanted / drawn, 1), 0 where nothing was drawn; the minimum first cannot overflow."""
    some = drawn > 0
    return np.divide(np.minimum(wanted, drawn), drawn, where=some, out=np.zeros(wanted.shape))


def _rest(p: F64, q: F64, scale: F64) -> F64:
    """max(scale * p - q, 0); 0 where the scale is 0, whatever p holds. [S, V]."""
    rest: F64 = np.where(scale[:, None] > 0, np.maximum(scale[:, None] * p - q, 0), 0)
    return rest


def _all_kept(drafts: I32) -> I32:
    return np.full(len(drafts), drafts.shape[1], np.int32)
