"""Comparisons: to the bit, or to a rounding of an exact value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.formats import bf16_ulp, f32_ulp

Array = npt.NDArray[Any]


def assert_same_bits(got: Array, want: Array) -> None:
    """Same type, shape and bits; -0 is not 0."""
    assert got.dtype == want.dtype, f"{got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{got.shape}, not {want.shape}"
    word = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.ascontiguousarray(got).view(word) != np.ascontiguousarray(want).view(word)
    assert not differ.any(), _first(differ, got, want)


def assert_is_bf16(x: Array) -> None:
    assert x.dtype == np.float32, f"bf16 values travel as float32, not {x.dtype}"
    assert not (np.ascontiguousarray(x).view(np.uint32) & 0xFFFF).any(), "not bf16 values"


def assert_rounded(got: Array, exact: npt.ArrayLike, form: str, error: npt.ArrayLike = 0.0) -> None:
    """`got` is `exact` (float64) rounded once to `form`, after arithmetic off by `error` at most.

    Without `error` this is correct rounding, whatever happens to ties.
    """
    wide = np.asarray(exact, np.float64)
    assert got.dtype == np.float32, f"{got.dtype}, not float32"
    assert got.shape == wide.shape, f"{got.shape}, not {wide.shape}"
    if form == "bf16":
        assert_is_bf16(got)
    slack = np.asarray(error, np.float64)
    unit = (bf16_ulp if form == "bf16" else f32_ulp)(np.abs(wide) + slack)
    # A hair beyond half a unit: `exact` itself carries float64 rounding.
    bad = ~(np.abs(got - wide) <= unit * (0.5 + 1e-7) + slack)
    assert not bad.any(), _first(bad, got, wide)


def assert_within(got: Array, exact: npt.ArrayLike, error: npt.ArrayLike) -> None:
    """|got - exact| <= error everywhere; infinities equal."""
    wide = np.asarray(exact, np.float64)
    assert got.shape == wide.shape, f"{got.shape}, not {wide.shape}"
    with np.errstate(invalid="ignore"):  # inf - inf, which the first condition decides
        bad = ~((got == wide) | (np.abs(got - wide) <= error))
    assert not bad.any(), _first(bad, got, wide)


def _first(bad: Array, got: Array, want: Array) -> str:
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {bad.size} differ, first at {at}: {got[at]!r}, not {want[at]!r}"
