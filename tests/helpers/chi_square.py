"""Pearson's chi-square for draws with fixed seeds: a wrong distribution fails, chance cannot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FEWEST = 10.0  # expected draws in a cell; rarer tokens share one


def chi_square(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> tuple[float, int]:
    """Statistic and degrees of freedom. A token of probability 0 that was drawn gives infinity."""
    seen, p = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    if seen[p == 0].any():
        return float("inf"), 0
    expected = p * seen.sum()
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    rare = expected < _FEWEST
    cells = [(float(seen[rare].sum()), float(expected[rare].sum()))] if rare.any() else []
    cells += list(zip(seen[~rare].tolist(), expected[~rare].tolist(), strict=True))
    cells = [(s, e) for s, e in cells if e > 0]
    return sum((s - e) ** 2 / e for s, e in cells), len(cells) - 1


def bound(freedom: int) -> float:
    """What chi-square exceeds with probability 1e-6 (Wilson and Hilferty's approximation)."""
    if freedom <= 0:
        return 1e-9
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.753 * np.sqrt(spread)) ** 3)


def fits(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> bool:
    """Whether the draws may come from this distribution."""
    statistic, freedom = chi_square(counts, probabilities)
    return statistic <= bound(freedom)
