from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from helpers.compare import assert_rounded, assert_same_bits
from helpers.formats import F32, F64, U8, bf16, dequantise, quantise
from helpers.layouts import LAYOUTS, POSITIONS, SLOTS, Layout, Span, every_layout
from helpers.ops import assert_launch, io, scratch, state
from helpers.values import activations
from ultraflash.graphs.ops.index_scores import IndexScores

HEADS, DIM = 3, 32
SCALE = 1 / 64
SIZE = 4  # of a pool's block
I32 = npt.NDArray[np.int32]


class Case:
    """Queries and keys of every position; entries out of reach hold keys as well."""

    def __init__(self, rng: np.random.Generator, ratio: int) -> None:
        self.ratio = ratio
        shape = (SLOTS, POSITIONS, HEADS, DIM)
        self.q: F32 = quantise("qmx4", activations(rng, *shape))[2].astype(np.float32)
        self.weight: F32 = bf16(rng.normal(size=shape[:3]))
        entries = -(-POSITIONS // ratio)
        self.codes: U8 = rng.integers(0, 256, size=(SLOTS, entries, DIM // 2)).astype(np.uint8)
        self.scales: U8 = rng.integers(120, 132, size=(SLOTS, entries, DIM // 32)).astype(np.uint8)
        self.keys: F64 = dequantise("qmx4", self.codes, self.scales)

    def run(self, layout: Layout, heads: slice = slice(None), pool: I32 | None = None) -> F32:
        return IndexScores.reference(
            layout.of(self.q)[:, heads], layout.of(self.weight)[:, heads], self.codes, self.scales,
            layout.slot, layout.position, pool, self.ratio, SIZE, SCALE,
        )  # fmt: skip

    def exact(self, slot: int, position: int, entry: int) -> float:
        """sum over heads of relu(q . key) * weight * scale, correctly rounded sums."""
        key = self.keys[slot, entry]
        terms = []
        for h in range(HEADS):
            dot = math.fsum(self.q[slot, position, h].astype(np.float64) * key)
            terms.append(max(dot, 0.0) * float(self.weight[slot, position, h]) * SCALE)
        return math.fsum(terms)


@every_layout
@pytest.mark.parametrize("ratio", [1, 2])
def test_against_exact_sums(rng: np.random.Generator, layout: Layout, ratio: int) -> None:
    case = Case(rng, ratio)
    y = case.run(layout)
    assert y.dtype == np.float32
    assert y.shape == (layout.rows, -(-POSITIONS // ratio))
    for row, span, position in layout.each():
        reach = (position + 1) // ratio  # n(p): a group counts once it is complete
        want = [case.exact(span.slot, position, j) for j in range(reach)]
        assert_rounded(y[row, :reach], np.array(want), "f32", 2.0**-45)
        assert (y[row, reach:] == -np.inf).all()
    assert (y[layout.active :] == -np.inf).all()  # idle rows can reach nothing


def test_negative_dots_count_as_zero() -> None:
    rng = np.random.default_rng(0)
    case = Case(rng, 1)
    case.weight[:] = 1
    y = case.run(Layout("one", (Span(0, 40, 1),)))
    assert y[0, :41].min() >= 0


def test_heads_of_ranks_add_up(rng: np.random.Generator) -> None:
    case, layout = Case(rng, 2), Layout("far", (Span(1, 80, 3),))
    whole = case.run(layout)
    parts = case.run(layout, slice(0, 1)) + case.run(layout, slice(1, 3))
    assert (np.isneginf(parts) == np.isneginf(whole)).all()
    real = np.isfinite(whole)
    assert np.abs(parts[real] - whole[real]).max() <= 2.0**-22 * np.abs(whole[real]).max()


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.active > 1], ids=lambda la: la.name)
@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_stand_alone(rng: np.random.Generator, layout: Layout, ratio: int) -> None:
    case = Case(rng, ratio)
    whole = case.run(layout)
    for row, alone in layout.steps():
        assert_same_bits(case.run(alone), whole[row])


@every_layout
@pytest.mark.parametrize("ratio", [1, 2])
def test_with_a_pool_only_its_blocks_in_its_order(
    rng: np.random.Generator, layout: Layout, ratio: int
) -> None:
    """Bit by bit what is there without a pool; -inf for absent blocks and beyond reach."""
    case = Case(rng, ratio)
    whole, blocks = case.run(layout), -(-case.codes.shape[1] // SIZE)
    pool = np.full((layout.rows, 5), -1, np.int32)
    for row, position in enumerate(layout.position.tolist()):
        count = -(-((position + 1) // ratio) // SIZE)
        few = min(count, int(rng.integers(1, 6)))
        pool[row, :few] = np.sort(rng.permutation(count)[:few])
    y = case.run(layout, pool=pool)
    assert y.shape == (layout.rows, min(5, blocks) * SIZE)
    padded = np.full((layout.rows, (blocks + 1) * SIZE), -np.inf, np.float32)
    padded[:, : whole.shape[1]] = whole  # block -1 is the last one: nothing
    want = padded.reshape(layout.rows, blocks + 1, SIZE)[np.arange(layout.rows)[:, None], pool]
    assert_same_bits(y, want.reshape(layout.rows, -1)[:, : y.shape[1]])


OP = IndexScores(
    scratch("q", 6, 32, 128),
    scratch("w", 6, 32),
    state("c", 2, 1000, 64),
    state("sc", 2, 1000, 4),
    io("s", 6),
    io("p", 6),
    None,
    scratch("y", 6, 1000, dtype="f32"),
    2,
    SIZE,
    SCALE,
)
INSIDE = replace(OP, pool=scratch("b", 6, 5, dtype="i32"), y=scratch("y", 6, 5 * SIZE, dtype="f32"))


def test_launch() -> None:
    names = ("q", "w", "c", "sc", "s", "p", "y")
    assert_launch(OP, "index_scores", names, pool=None, ratio=2, scale=SCALE)
    assert_launch(INSIDE, "index_scores", (*names[:-1], "b", "y"), ratio=2, block_size=SIZE)


@pytest.mark.parametrize("rows", [1, 8, 16, 4096])
@pytest.mark.parametrize("heads", [2, 4, 8, 32])
def test_every_row_and_entry_has_a_place_in_the_grid(rows: int, heads: int) -> None:
    for op in (OP, INSIDE):
        q = scratch("q", rows, heads, 128)
        grid = replace(op, q=q, y=replace(op.y, shape=(rows, op.y.shape[1]))).launch("sm_90a").grid
        columns = dict(op.compiled())["COLUMNS"]
        assert grid[1] * columns >= rows * heads
        assert 1 <= grid[0] * 256 < op.y.shape[1] + 256


def test_cost() -> None:
    """Rows of one sequence share a scan of 68 bytes an entry (model.md 9)."""
    rows = 6 * (2 * 32 * 128 + 2 * 32 + 4 + 4 + 4 * 1000)
    assert OP.cost().nbytes == rows + 1000 * 68
    assert OP.cost().flops == 2 * 6 * 32 * 128 * 1000


def test_cost_inside_a_pool() -> None:
    """Every row reads its own 20 places."""
    rows = 6 * (2 * 32 * 128 + 2 * 32 + 4 + 4 + 4 * 5 + 4 * 20)
    assert INSIDE.cost().nbytes == rows + 6 * 20 * 68
    assert INSIDE.cost().flops == 2 * 6 * 32 * 128 * 20
