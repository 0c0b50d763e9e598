from __future__ import annotations

import numpy as np
import pytest

from helpers.compare import assert_is_bf16, assert_rounded, assert_same_bits
from helpers.formats import F32
from helpers.layouts import LAYOUTS, POSITIONS, RING, SLOTS, Layout, Span, every_layout
from helpers.ops import assert_launch, io, scratch, state
from ultraflash.graphs.ops.compress_pairs import CompressPairs

DIM = 32


def run(layout: Layout, kv: F32, gate: F32) -> F32:
    garbage = np.full((SLOTS, RING, DIM), 77.0, np.float32)
    return CompressPairs.reference(
        layout.of(kv), layout.of(gate),
        layout.ring_before(kv, garbage), layout.ring_before(gate, garbage),
        layout.slot, layout.position, layout.row_start,
    )  # fmt: skip


def timelines(rng: np.random.Generator, spread: float = 2.0) -> tuple[F32, F32]:
    kv = rng.normal(size=(SLOTS, POSITIONS, DIM)).astype(np.float32)
    return kv, (rng.normal(size=kv.shape) * spread).astype(np.float32)


@every_layout
@pytest.mark.parametrize("spread", [0.0, 2.0, 300.0])
def test_gated_mean_of_two_tokens(rng: np.random.Generator, layout: Layout, spread: float) -> None:
    """Group j = tokens 2j, 2j+1 (model.md 4.5): a row at an odd position closes one."""
    kv, gate = timelines(rng, spread)
    y = run(layout, kv, gate)
    assert_is_bf16(y)
    for row, span, position in layout.each():
        if position % 2 == 0:
            assert not y[row].any()
            continue
        k0, k1 = kv[span.slot, position - 1 : position + 1].astype(np.float64)
        g0, g1 = gate[span.slot, position - 1 : position + 1].astype(np.float64)
        share = 1 / (1 + np.exp(np.clip(g1 - g0, -700, 700)))
        want = share * k0 + (1 - share) * k1
        # float32: two exponentials, a sum, two quotients, two products and a sum. The exponent's
        # own rounding is relative to the gates.
        error = (2.0**-21 + 2.0**-23 * np.abs(g1 - g0)) * (np.abs(k0) + np.abs(k1))
        assert_rounded(y[row], want, "bf16", error)


def test_a_token_does_not_pair_with_another_sequence(rng: np.random.Generator) -> None:
    """The row before may be a neighbour's: its own previous token waits in the ring."""
    kv, gate = timelines(rng)
    layout = Layout("neighbours", (Span(0, 4, 1), Span(1, 9, 1), Span(2, 3, 2)))
    y = run(layout, kv, gate)
    alone = run(Layout("alone", (Span(1, 9, 1),)), kv, gate)
    assert_same_bits(y[1:2], alone)


def test_extreme_gates_choose_one_token_without_a_warning(rng: np.random.Generator) -> None:
    kv, gate = timelines(rng)
    gate[0, 0], gate[0, 1] = 1e38, -1e38
    y = run(Layout("pair", (Span(0, 0, 2),)), kv, gate)
    assert_rounded(y[1], kv[0, 0], "bf16")


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.active > 1], ids=lambda la: la.name)
def test_rows_stand_alone(rng: np.random.Generator, layout: Layout) -> None:
    kv, gate = timelines(rng)
    whole = run(layout, kv, gate)
    for row, alone in layout.steps():
        assert_same_bits(run(alone, kv, gate), whole[row])


OP = CompressPairs(
    scratch("kv", 6, 512, dtype="f32"),
    scratch("g", 6, 512, dtype="f32"),
    state("kr", 3, 256, 512, dtype="f32"),
    state("gr", 3, 256, 512, dtype="f32"),
    io("s", 6),
    io("p", 6),
    io("r", 3),
    scratch("y", 6, 512),
)


def test_launch() -> None:
    assert_launch(OP, "compress_pairs", ("kv", "g", "kr", "gr", "s", "p", "r", "y"))


def test_cost() -> None:
    """Rows in and out; of state one pending pair of 4,096 bytes a sequence (model.md 5.2)."""
    rows = 6 * 512 * (4 + 4 + 2) + 4 * (6 + 6 + 3)
    assert OP.cost().nbytes == rows + 2 * 4096
