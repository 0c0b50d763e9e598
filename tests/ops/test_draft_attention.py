"""Attention of draft blocks against model.md 6.2 in float64, a row, a head, a key at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.attending import PLAIN, assert_row, plain, rounded_in_groups
from helpers.compare import Array, assert_is_bf16, assert_same_bits, assert_within
from helpers.formats import F32, F64, U8, dequantise, quantise
from helpers.invariance import Choice, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, state, weight
from helpers.values import activations, angles, codes_without_nan
from ultraflash.graphs.ops.draft_attention import DraftAttention

PAIRS, SLOTS, POSITIONS = 8, 3, 300
I32 = npt.NDArray[np.int32]
IDLE = (-1, 0)
# (slot, position of the anchor): around the window of 8, the ring of 16, and beside each other.
PLACES: dict[str, list[tuple[int, int]]] = {
    "behind_one_row": [(0, 1)],
    "below_the_window": [(1, 7)],
    "at_the_window": [(2, 8)],
    "above_the_window": [(0, 9)],
    "at_the_ring_edge": [(1, 16)],
    "across_the_ring_edge": [(1, 21)],
    "three": [(2, 50), (0, 3), (1, 17)],
    "three_and_idle": [(2, 50), IDLE, (1, 17), IDLE],
    "nobody": [IDLE],
}
places = pytest.mark.parametrize("at", PLACES.values(), ids=PLACES.keys())


@dataclass
class Case:
    """Context rows of every position of every slot, and a block of rows for each place."""

    rng: np.random.Generator
    at: list[tuple[int, int]]
    block: int = 5
    window: int = 8
    ring: int = 16
    heads: int = 3
    dim: int = 32
    size: float = 1.0  # of the logits, roughly
    sink: F32 = field(init=False)

    def __post_init__(self) -> None:
        rng, count = self.rng, len(self.at)
        self.q = activations(rng, count, self.block, self.heads, self.dim, spread=0.5)
        self.q *= np.float32(2.0 ** np.round(np.log2(self.size)))
        rows = activations(rng, SLOTS, POSITIONS, self.dim, spread=0.5)
        self.context, self.context_scales, _ = quantise("q8", rows)
        own = activations(rng, count, self.block, self.dim, spread=0.5)
        self.codes, self.scales, _ = quantise("q8", own)
        shape = count, self.block, PAIRS
        cos, sin = angles(rng, count * self.block, PAIRS)
        self.cos, self.sin = cos.reshape(shape), sin.reshape(shape)
        self.sink = rng.normal(size=self.heads).astype(np.float32)
        self.garbage = codes_without_nan(rng, SLOTS, self.ring, self.dim)

    def rings(self) -> tuple[U8, U8]:
        """What steps before left: every row up to the last accepted one, garbage elsewhere."""
        codes = self.garbage.copy()
        scales: U8 = np.full((SLOTS, self.ring, self.dim // 32), 127, np.uint8)
        for slot, at in self.at:
            for p in range(max(0, at - self.ring), at) if slot >= 0 else ():
                codes[slot, p % self.ring] = self.context[slot, p]
                scales[slot, p % self.ring] = self.context_scales[slot, p]
        return codes, scales

    def run(self, chosen: npt.ArrayLike | None = None, round_weights: bool = False) -> F32:
        """[S, B, H*E] of the chosen places, all by default."""
        which = np.arange(len(self.at)) if chosen is None else np.asarray(chosen)
        slot, at = np.array(self.at, np.int32)[which].T
        position = (at[:, None] + np.arange(self.block)).astype(np.int32)
        y = DraftAttention.reference(
            self.rows(self.q, which), self.rows(self.codes, which), self.rows(self.scales, which),
            *self.rings(), self.sink, self.rows(self.cos, which), self.rows(self.sin, which),
            np.repeat(slot, self.block), position.reshape(-1),
            self.window, self.block, round_weights,
        )  # fmt: skip
        assert y.shape == (len(which) * self.block, self.heads * self.dim)
        return y.reshape(len(which), self.block, -1)

    def rows(self, values: Array, which: npt.NDArray[Any]) -> Array:
        """Block rows of the chosen places, one after the other."""
        return values[which].reshape(-1, *values.shape[2:])

    def keys(self, number: int) -> F64:
        """Ring rows max(0, p-W+1) .. p, then the whole block: the same for all its queries."""
        slot, at = self.at[number]
        past = range(max(0, at - self.window), at)
        rows = [dequantise("q8", self.context[slot, p], self.context_scales[slot, p]) for p in past]
        rows += list(dequantise("q8", self.codes[number], self.scales[number]))
        return np.stack(rows)

    def mixed(self, number: int, row: int, round_weights: bool = False) -> F64:
        """Outputs of all heads before the first rounding. [H, E]."""
        keys = self.keys(number)
        mix = rounded_in_groups if round_weights else plain
        logits = self.q[number, row].astype(np.float64) @ keys.T * self.dim**-0.5
        return np.stack([mix(logits[h], keys, sink) for h, sink in enumerate(self.sink.tolist())])

    def check(self, y: F32, error: float, round_weights: bool = False) -> None:
        assert_is_bf16(y)
        assert np.isfinite(y).all()
        for number, (slot, _) in enumerate(self.at):
            for row in range(self.block) if slot >= 0 else ():
                mixed, at = self.mixed(number, row, round_weights), (number, row)
                assert_row(y[at], mixed, self.cos[at], self.sin[at], error)


@places
@pytest.mark.parametrize("block", [1, 5, 6, 7])
def test_against_float64(rng: np.random.Generator, at: list[tuple[int, int]], block: int) -> None:
    case = Case(rng, at, block)
    case.check(case.run(), PLAIN)


@pytest.mark.parametrize("at", [1, 100, 128, 129, 270])
@pytest.mark.parametrize("block", [5, 7])
def test_the_window_of_the_release(rng: np.random.Generator, at: int, block: int) -> None:
    """128 context rows and a block: more than two groups of 64 keys."""
    case = Case(rng, [(1, at)], block, window=128, ring=256, heads=2, dim=64)
    assert len(case.keys(0)) == min(at, 128) + block
    case.check(case.run(), PLAIN)


def test_large_logits(rng: np.random.Generator) -> None:
    case = Case(rng, PLACES["three"], size=256.0)
    case.check(case.run(), 2.0**-12)


def test_the_window_does_not_slide_inside_a_block(rng: np.random.Generator) -> None:
    """Rows that ask the same under the same angle get the same answer."""
    case = Case(rng, [(1, 21), (0, 3)])
    for a in (case.q, case.cos, case.sin):
        a[:, 1:] = a[:, :1]
    y = case.run()
    for row in range(1, 5):
        assert_same_bits(y[:, row], y[:, 0])


@pytest.mark.parametrize("seen", range(5))
def test_every_row_sees_every_row_of_its_block(rng: np.random.Generator, seen: int) -> None:
    """Later ones and itself too; other sequences' blocks are nobody's business."""
    case = Case(rng, [(1, 21), (0, 3)])
    before = case.run()
    case.codes[0, seen] ^= 0x80
    after = case.run()
    assert (after[0] != before[0]).any(axis=-1).all()
    assert_same_bits(after[1], before[1])


def test_rejected_rows_and_old_rows_do_not_count(rng: np.random.Generator) -> None:
    """Ring rows at the anchor's position and behind hold drafts that were thrown away."""
    case = Case(rng, [(1, 21), (0, 3)])
    before = case.run()
    case.garbage = codes_without_nan(rng, *case.garbage.shape)
    for slot, at in case.at:
        case.context[slot, : max(0, at - case.window)] ^= 0x80
        case.context[slot, at:] ^= 0x80
    case.context[2] ^= 0x80
    assert_same_bits(case.run(), before)


@pytest.mark.parametrize("position", [13, 20])
def test_the_oldest_and_the_newest_context_row_count(
    rng: np.random.Generator, position: int
) -> None:
    case = Case(rng, [(1, 21)])
    before = case.run()
    case.context[1, position] ^= 0x80
    assert (case.run() != before).any(axis=-1).all()


@pytest.mark.parametrize(("sink", "share"), [(-np.inf, 1.0), (-1e4, 1.0), (80.0, 0.0)])
def test_the_sink_takes_its_share_and_has_no_value(
    rng: np.random.Generator, sink: float, share: float
) -> None:
    case = Case(rng, [(1, 30)])
    case.sink[:] = -np.inf
    without = case.run()
    case.sink[:] = sink
    assert_within(case.run(), share * without, 1e-6)


def test_the_sink_belongs_to_its_head(rng: np.random.Generator) -> None:
    case = Case(rng, [(1, 30), (0, 4)])
    before = case.run().reshape(2, 5, case.heads, case.dim)
    case.sink[1] += 1
    after = case.run().reshape(2, 5, case.heads, case.dim)
    assert_same_bits(after[:, :, [0, 2]], before[:, :, [0, 2]])
    assert (after[:, :, 1] != before[:, :, 1]).any(axis=-1).all()


@pytest.mark.parametrize("size", [1.0, 8.0])
def test_weights_rounded_in_groups_of_64(rng: np.random.Generator, size: float) -> None:
    """As in `Attention`: the authors' kernel, for tight comparison."""
    case = Case(rng, [(1, 270), (2, 128)], 5, window=128, ring=256, heads=2, dim=64, size=size)
    case.check(case.run(round_weights=True), 2.0**-13, round_weights=True)


@places
def test_rounded_weights_below_the_window(
    rng: np.random.Generator, at: list[tuple[int, int]]
) -> None:
    """Weights are off by half a bf16 ulp at most, whatever the groups."""
    case = Case(rng, at)
    case.check(case.run(round_weights=True), 2.0**-7)


@every_choice
@pytest.mark.parametrize("round_weights", [False, True])
@pytest.mark.parametrize("block", [5, 7])
def test_sequences_stand_alone(
    rng: np.random.Generator, choice: Choice, round_weights: bool, block: int
) -> None:
    at = [IDLE, (0, 40), (1, 3), (2, 17), (0, 40), IDLE, (2, 17), (1, 3), (0, 40)]
    case, chosen = Case(rng, at, block), choice(9)
    assert_same_bits(case.run(chosen, round_weights), case.run(None, round_weights)[chosen])


def op(sequences: int) -> DraftAttention:
    """The release's on one rank."""
    rows = 5 * sequences
    return DraftAttention(
        scratch("q", rows, 64, 512), scratch("c", rows, 512, dtype="u8"),
        scratch("s", rows, 16, dtype="u8"), state("rc", 2, 256, 512), state("rs", 2, 256, 16),
        weight("sink", 64, dtype="f32"), scratch("cos", rows, 32, dtype="f32"),
        scratch("sin", rows, 32, dtype="f32"), scratch("slot", rows, dtype="i32"),
        scratch("p", rows, dtype="i32"), scratch("y", rows, 32768), 128, 5, False,
    )  # fmt: skip


def test_launch() -> None:
    names = ("q", "c", "s", "rc", "rs", "sink", "cos", "sin", "slot", "p", "y")
    assert_launch(op(2), "draft_attention", names, window=128, block=5, round_weights=False)


@pytest.mark.parametrize("sequences", [1, 3])
def test_cost(sequences: int) -> None:
    """Of state, 128 window rows of 528 bytes for every block."""
    rows = 5 * sequences
    own = rows * (2 * 32768 + 528 + 2 * 4 * 32 + 4 + 4 + 2 * 32768) + 4 * 64
    assert_cost(op(sequences), own + sequences * 128 * 528, 4 * rows * 64 * 512 * (128 + 5))
