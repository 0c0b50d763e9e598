"""Row invariance: a row's bits do not depend on how many rows there are, nor on its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.compare import assert_same_bits

Array = npt.NDArray[Any]
Choice = Callable[[int], npt.NDArray[np.intp]]

# Which rows of a step of n run again, beside which others.
CHOICES: dict[str, Choice] = {
    "first_alone": lambda n: np.array([0]),
    "last_alone": lambda n: np.array([n - 1]),
    "middle_alone": lambda n: np.array([n // 2]),
    "two": lambda n: np.array([n - 1, 0]),
    "odd_ones": lambda n: np.arange(1, n, 2),
    "reversed": lambda n: np.arange(n)[::-1].copy(),
    "all_but_one": lambda n: np.arange(n - 1),
    "one_many_times": lambda n: np.full(n + 3, n // 2),
    "twice_over": lambda n: np.tile(np.arange(n), 2),
}

every_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())


def assert_rows_alone(run: Callable[..., Any], rows: Sequence[Array], choice: Choice) -> None:
    """`run(*rows)` gives chosen rows the bits that they have among all; rows are the first axis."""
    chosen = choice(len(rows[0]))
    whole, part = (_several(run(*arrays)) for arrays in (rows, [a[chosen] for a in rows]))
    for all_rows, some_rows in zip(whole, part, strict=True):
        assert_same_bits(some_rows, all_rows[chosen])


def _several(result: Any) -> tuple[Array, ...]:
    return result if isinstance(result, tuple) else (result,)
