"""all_reduce: the sum over ranks."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_rounded
from helpers.formats import bf16
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_launch, scratch
from ultraflash.graphs.ops.all_reduce import AllReduce


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (3, 6, 32)])
@pytest.mark.parametrize("rounded", [True, False])
def test_sum_against_float64(
    rng: np.random.Generator, world: int, shape: tuple[int, ...], rounded: bool
) -> None:
    parts = [rng.normal(size=shape).astype(np.float32) for _ in range(world)]
    wide = np.stack(parts).astype(np.float64)
    error = (world - 1) * 2.0**-24 * np.abs(wide).sum(axis=0)  # float32 additions
    y = AllReduce.reference(parts, rounded)
    assert_rounded(y, wide.sum(axis=0), "bf16" if rounded else "f32", error)


def test_rank_0_comes_first() -> None:
    """float32 forgets the 1 that is added to 2^25, and keeps the one that comes after."""
    big = np.float32(2.0**25)
    columns = [[big, 1, -big, 1], [1, big, -big, 1], [1, 1, big, -big]]
    parts = [np.array([[c[rank] for c in columns]], np.float32) for rank in range(4)]
    assert AllReduce.reference(parts, False).tolist() == [[1.0, 1.0, 0.0]]


def test_the_sum_is_rounded_once_at_the_end() -> None:
    """Rounding every partial sum to bf16 would lose both small parts."""
    parts = [np.array([[v]], np.float32) for v in (1.0, 2.0**-8, 2.0**-8)]
    assert AllReduce.reference(parts, True).tolist() == [[1 + 2.0**-7]]


def test_unreachable_scores_stay_unreachable() -> None:
    parts = [np.array([[-np.inf, 1.0]], np.float32)] * 2
    assert AllReduce.reference(parts, False).tolist() == [[-np.inf, 2.0]]


def test_no_rank_loses_its_part() -> None:
    parts = [bf16(np.full((2, 32), float(r))) for r in range(4)]
    AllReduce.reference(parts, False)
    for rank, part in enumerate(parts):
        assert (part == rank).all()


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    parts = [rng.normal(size=(9, 64)).astype(np.float32) for _ in range(3)]
    assert_rows_alone(lambda *ranks: AllReduce.reference(list(ranks), True), parts, choice)


def test_it_is_collective() -> None:
    """The interpreter hands it all ranks' arrays."""
    assert AllReduce.COLLECTIVE


def reduce(*shape: int) -> AllReduce:
    return AllReduce(scratch("x", *shape, dtype="f32"), scratch("y", *shape), True)


def test_launch() -> None:
    assert_launch(reduce(3, 64), "all_reduce", ("x", "y"), rounded=True)


@pytest.mark.parametrize(
    ("shape", "ctas"),
    [((1, 1), 1), ((3, 64), 1), ((7, 5120), 35), ((2, 3, 1025), 7), ((4096, 5120), 128)],
)
def test_a_message_is_spread_thinly_over_no_more_than_fit(
    shape: tuple[int, ...], ctas: int
) -> None:
    """Four values a thread; CTAs wait for other ranks, so all of them must run at once."""
    geometry = reduce(*shape).geometry()
    assert (geometry.x, geometry.y, geometry.threads) == (ctas, 1, 256)


def test_cost() -> None:
    """One rank's own memory; what crosses the link is not counted here."""
    assert reduce(3, 64).cost().nbytes == 3 * 64 * (4 + 2)
