"""Comparing arrays: each function measures one distance and says whether it stays within a limit.

A wrong shape or a NaN is never close enough, whatever the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Verdict:
    """One comparison: `error` and `limit` are in the unit that `note` or the item implies."""

    ok: bool
    error: float
    limit: float
    note: str = ""


def within(error: float, limit: float, note: str = "") -> Verdict:
    """A verdict on a number that was measured elsewhere (NaN fails)."""
    return Verdict(error <= limit, error, limit, note)


def misshapen(got: Array, want: Array) -> Verdict | None:
    """A failed verdict when the shapes differ."""
    if got.shape == want.shape:
        return None
    return Verdict(False, math.inf, 0.0, f"shape {got.shape} instead of {want.shape}")


def exact(got: Any, want: Any) -> Verdict:
    """Number of elements that differ; floats are compared bit for bit (-0 is not 0)."""
    a, b = np.asarray(got), np.asarray(want)
    bad = misshapen(a, b)
    if bad:
        return bad
    if b.dtype.kind == "f":
        a, b = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (a, b))
    differ = int((a.astype(np.int64) != b.astype(np.int64)).sum())
    return within(differ, 0, f"{differ} of {b.size} values differ" if differ else "")


def relative_rms(got: Array, want: Array) -> float:
    """sqrt(mean((got - want)^2) / mean(want^2)), in float64."""
    if not want.size:
        return 0.0
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return math.sqrt(float(np.square(a - b).mean())) / max(
        math.sqrt(float(np.square(b).mean())), 1e-30
    )


def relative(got: Any, want: Array, limit: float, note: str = "") -> Verdict:
    """Relative rms of the whole array."""
    a = np.asarray(got)
    return misshapen(a, want) or within(relative_rms(a, want), limit, note)


def absolute(got: Any, want: Array, limit: float) -> Verdict:
    """Largest absolute difference."""
    a = np.asarray(got)
    bad = misshapen(a, want)
    if bad:
        return bad
    error = float(np.abs(a.astype(np.float64) - want).max()) if want.size else 0.0
    return within(error, limit, "absolute")


def bf16_ulps(got: Any, want: Array, limit: float) -> Verdict:
    """Largest distance in bf16 steps."""
    a = np.asarray(got, np.float32)
    bad = misshapen(a, want)
    if bad:
        return bad
    error = float(np.abs(_bf16_order(a) - _bf16_order(want)).max()) if want.size else 0.0
    return within(error, limit, "bf16 ulps")


def rows_with_other_sets(got: Any, want: Array) -> npt.NDArray[np.bool_]:
    """Rows of ids that differ as sets; -1 means no id. The two may have different widths."""
    a, b = np.asarray(got), np.asarray(want)
    if a.ndim != 2 or len(a) != len(b):
        return np.ones(len(b), bool)
    return np.array(
        [set(x.tolist()) - {-1} != set(y.tolist()) - {-1} for x, y in zip(a, b, strict=True)]
    )


def missed(got: Any, want: Array) -> npt.NDArray[np.float64]:
    """For each row, the share of the wanted ids that is not there (1: none wanted, some there)."""
    a = np.asarray(got)
    if a.ndim != 2 or len(a) != len(want):
        return np.ones(len(want))
    rows = []
    for mine, theirs in zip(a.tolist(), want.tolist(), strict=True):
        have, need = set(mine) - {-1}, set(theirs) - {-1}
        rows.append(len(need - have) / len(need) if need else float(bool(have)))
    return np.array(rows)


def sets(got: Any, want: Array, share: float) -> Verdict:
    """Rows of ids that differ as sets; a `share` of the rows, rounded down, may."""
    differ = int(rows_with_other_sets(got, want).sum())
    return within(differ, math.floor(share * len(want)), f"rows that differ, of {len(want)}")


def paired(got_ids: Any, got: Any, want_ids: Array, want: Array, limit: float) -> Verdict:
    """Relative rms of values that belong to ids, whatever the order of each row's ids.

    Rows with other ids are left out, `sets` judges them; one row at least must be comparable.
    """
    a_ids, a = np.asarray(got_ids), np.asarray(got)
    bad = misshapen(a_ids, want_ids) or misshapen(a, want)
    if bad:
        return bad
    same = ~rows_with_other_sets(a_ids, want_ids)
    if not same.any():
        return Verdict(False, math.inf, limit, "no row chose the golden ids")
    mine = np.take_along_axis(a, a_ids.argsort(1), 1)[same]
    theirs = np.take_along_axis(want, want_ids.argsort(1), 1)[same]
    return relative(mine, theirs, limit, f"rows compared: {int(same.sum())} of {len(same)}")


def _bf16_order(x: Array) -> npt.NDArray[np.int64]:
    """bf16 values as integers in value order, so that neighbours differ by one and -0 equals 0."""
    bits = (np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.int64)
    return np.where(bits >= 0x8000, 0x8000 - bits, bits)
