from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.compare import assert_same_bits
from helpers.layouts import LAYOUTS, POSITIONS, RING, SLOTS, Layout, Span, every_layout
from helpers.ops import assert_cost, assert_launch, io, scratch, state, weight
from helpers.properties import examples
from helpers.tiny import tensors
from ultraflash.graphs.ops.engram_hash import EngramHash
from ultraflash.graphs.ops.engram_ids import DEAD

I64 = npt.NDArray[np.int64]
GOLDEN = tensors("engram_hash")
PAD = 2  # of both: the map sends the pad token to itself


def constants(which: str, layer: int) -> tuple[I64, I64, I64]:
    """Multipliers, primes and offsets as the authors' code has them."""
    primes = GOLDEN[f"{which}.primes"][layer].reshape(-1)
    return GOLDEN[f"{which}.multipliers"][layer], primes, GOLDEN[f"{which}.offsets"][layer]


def by_definition(history: list[int], which: str, layer: int, pad: int = PAD) -> list[int]:
    """Model.md 4.3 in Python integers; `history`: compressed ids up to the row, DEAD included."""
    multipliers, primes, offsets = (c.tolist() for c in constants(which, layer))
    grams: list[int] = []
    ended = False
    for distance in range(len(multipliers)):
        at = len(history) - 1 - distance
        ended = ended or at < 0 or history[at] == DEAD
        grams.append(pad if ended else history[at])
    rows, heads, mixed = [], len(primes) // (len(multipliers) - 1), grams[0] * multipliers[0]
    for order in range(1, len(multipliers)):
        mixed ^= grams[order] * multipliers[order]
        for head in range(heads):
            column = (order - 1) * heads + head
            rows.append(mixed % primes[column] + offsets[column])
    return rows


def run(layout: Layout, timeline: npt.NDArray[Any], which: str, layer: int, pad: int = PAD) -> I64:
    """EngramHash on a layout, the rows before it in the ring."""
    garbage = np.full((SLOTS, RING), 12345, np.int32)
    token_map = np.full(pad + 1, -7, np.int64)
    token_map[pad] = pad
    return EngramHash.reference(
        layout.of(timeline), layout.ring_before(timeline, garbage), layout.slot, layout.position,
        layout.row_start, token_map, *constants(which, layer), pad,
    )  # fmt: skip


@every_layout
@pytest.mark.parametrize(("which", "layer"), [("full", 0), ("full", 1), ("tiny", 0), ("tiny", 1)])
def test_against_python_integers(
    rng: np.random.Generator, layout: Layout, which: str, layer: int
) -> None:
    timeline = rng.integers(0, 435, size=(SLOTS, POSITIONS)).astype(np.int32)
    timeline[rng.random(timeline.shape) < 0.15] = DEAD
    y = run(layout, timeline, which, layer)
    assert y.dtype == np.int64
    assert y.shape == (layout.rows, len(constants(which, layer)[1]))
    for row, span, position in layout.each():
        history = timeline[span.slot, : position + 1].tolist()
        assert y[row].tolist() == by_definition(history, which, layer)


@pytest.mark.parametrize("which", ["full", "tiny"])
@pytest.mark.parametrize("split", [40, 1, 7])
def test_against_the_authors(which: str, split: int) -> None:
    """The golden sequences, whole and in chunks."""
    ids = GOLDEN[f"{which}.ids"]
    compressed = ids if which == "full" else GOLDEN["tiny.token_map"][ids]
    timeline = np.where(GOLDEN[f"{which}.live"] > 0, compressed, DEAD).astype(np.int32)
    for start in range(0, 40, split):
        length = min(split, 40 - start)
        layout = Layout("golden", tuple(Span(s, start, length) for s in range(3)))
        for layer in (0, 1):
            want = GOLDEN[f"{which}.rows"][:, start : start + length, layer]
            assert_same_bits(run(layout, timeline, which, layer), want.reshape(3 * length, -1))


def test_check_vectors() -> None:
    """Model.md 4.3, compressed ids 0, 7, 99091, dead, 12345, 8."""
    timeline = np.array([[0, 7, 99091, DEAD, 12345, 8]], np.int32)
    layout = Layout("vectors", (Span(0, 0, 6),))
    one, fourteen = (run(layout, timeline, "full", layer) for layer in (0, 1))
    first = [4120285, 20896480, 38390893, 58888205, 70109306, 81443105, 96533837, 125252592]
    assert one[2].tolist()[:9] == [*first, 135465130]
    assert one[2, -1] == 375588124
    assert (fourteen[2, 0], fourteen[2, 1], fourteen[2, -1]) == (3896432, 26583606, 373515775)
    assert (*one[5, :3].tolist(), int(one[5, -1])) == (15464199, 25141986, 33305864, 373200112)
    assert (*one[0, :3].tolist(), int(one[0, -1])) == (5702652, 24393184, 39183301, 380066193)


def test_rows_stay_inside_the_table(rng: np.random.Generator) -> None:
    timeline = rng.integers(0, 99092, size=(SLOTS, POSITIONS)).astype(np.int32)
    for layer in (0, 1):
        _, primes, offsets = constants("full", layer)
        y = run(Layout("many", (Span(0, 0, 96),)), timeline, "full", layer)
        assert ((y >= offsets) & (y < offsets + primes)).all()


@examples(150)
@given(
    ids=st.lists(st.one_of(st.just(DEAD), st.integers(0, 99091)), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23), max_size=5),
)
def test_any_split_gives_the_same_rows(ids: list[int], cuts: set[int]) -> None:
    timeline = np.array([ids], np.int32)
    edges = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    for start, end in itertools.pairwise(edges):
        y = run(Layout("part", (Span(0, start, end - start),)), timeline, "full", 1)
        for row, position in enumerate(range(start, end)):
            assert y[row].tolist() == by_definition(ids[: position + 1], "full", 1)


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.active > 1], ids=lambda la: la.name)
def test_rows_stand_alone(rng: np.random.Generator, layout: Layout) -> None:
    timeline = rng.integers(0, 435, size=(SLOTS, POSITIONS)).astype(np.int32)
    whole = run(layout, timeline, "tiny", 0)
    for row, alone in layout.steps():
        assert_same_bits(run(alone, timeline, "tiny", 0), whole[row])


OP = EngramHash(
    scratch("i", 3, dtype="i32"),
    state("h", 2, 64, dtype="i32"),
    io("s", 3),
    io("p", 3),
    io("r", 2),
    weight("m", 512, dtype="i64"),
    weight("mul", 4, dtype="i64"),
    weight("pr", 24, dtype="i64"),
    weight("o", 24, dtype="i64"),
    scratch("y", 3, 24, dtype="i64"),
    2,
)


def test_launch() -> None:
    buffers = ("i", "h", "s", "p", "r", "m", "mul", "pr", "o", "y")
    assert_launch(OP, "engram_hash", buffers, pad_token=2)


def test_cost() -> None:
    """Of the map one entry, the pad token's; of the history three ids a row."""
    assert_cost(OP, 3 * 3 * 4 + 2 * 4 + (4 + 24 + 24) * 8 + 3 * 24 * 8 + 8 + 3 * 3 * 4)
