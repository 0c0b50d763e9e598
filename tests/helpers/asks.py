"""What sequences ask of `accept`, as its arguments, and the exact distribution of the answer.

`exact` is the distribution of architecture.md section 5 in plain Python: bias, mask and ban, then
temperature, top_k, top_p.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from helpers.chances import biased, chances
from helpers.formats import F32
from ultraflash.graphs.ops.accept import Accept

DRAWS = 6_000
Sampled: TypeAlias = tuple[npt.NDArray[np.int32], F32, npt.NDArray[np.int32], F32]
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
    gone = ask.forbidden | {ask.banned}
    return [-INF if t in gone else v for t, v in enumerate(biased(ask.logits, ask.bias))]


def exact(ask: Ask) -> list[float]:
    """The distribution of the token, temperature > 0."""
    return chances(final_logits(ask), ask.temperature, ask.top_p, ask.top_k)


def words(size: int, forbidden: frozenset[int]) -> npt.NDArray[np.uint32]:
    """One bit a token, set where it is allowed; bits behind the vocabulary are set as well."""
    mask = [0xFFFFFFFF] * -(-size // 32)
    for token in forbidden:
        mask[token // 32] &= ~(1 << token % 32)
    return np.array(mask, np.uint32)


def arguments(asks: list[Ask], biases: int = 4) -> list[npt.NDArray[Any]]:
    """Arrays of Accept.reference with one row a sequence; `position` is the emitted token's."""
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


def one_row_each(*columns: npt.NDArray[Any]) -> Sampled:
    """Accept's result for `arguments`, without the count of accepted drafts, which is 0."""
    logits, mask, bias_ids, bias, banned, temperature, top_p, top_k, seed, position, step, want = (
        columns
    )
    count = len(logits)
    rows = np.arange(count, dtype=np.int32)
    accepted, token, logprob, top_ids, top_logprobs = Accept.reference(
        logits, rows * 0, rows, position - 1, np.arange(count + 1, dtype=np.int32), None,
        mask, bias_ids, bias, banned, temperature, top_p, top_k, seed, step, want,
    )  # fmt: skip
    assert not accepted.any()
    return token, logprob, top_ids, top_logprobs


def sample(*asks: Ask) -> Sampled:
    return one_row_each(*arguments(list(asks)))


def token(ask: Ask) -> int:
    return int(sample(ask)[0][0])


@functools.cache
def draws(ask: Ask, vary: str = "seed", count: int = DRAWS) -> npt.NDArray[np.intp]:
    """How often each token comes when only `vary` changes."""
    rows = arguments([ask])
    many = [np.repeat(a, count, axis=0) for a in rows]
    index = {"seed": 8, "position": 9, "step": 10}[vary]
    many[index] = np.arange(count).astype(rows[index].dtype) + rows[index]
    tokens = one_row_each(*many)[0]
    return np.bincount(tokens, minlength=len(ask.logits))
