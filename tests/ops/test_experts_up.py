from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt
import pytest

from helpers.compare import assert_is_bf16, assert_rounded, assert_same_bits
from helpers.formats import F32, F64, bf16, bf16_ulp
from helpers.invariance import Choice, assert_rows_alone, every_choice
from helpers.ops import assert_cost, assert_launch, scratch, weight
from helpers.values import activations, fp4_weight, through_q8
from ultraflash import ptx
from ultraflash.graphs.ops import experts_up
from ultraflash.graphs.ops.expert_rows import num_chunks
from ultraflash.graphs.ops.experts_up import ExpertsUp, experts_geometry, wide_rows

LIMIT = 10.0
I32 = npt.NDArray[np.int32]


def choices(rng: np.random.Generator, rows: int, experts: int, k: int) -> I32:
    """Distinct ascending experts a row."""
    picked = [np.sort(rng.choice(experts, size=k, replace=False)) for _ in range(rows)]
    return np.array(picked, np.int32)


def assert_by_definition(
    y: F32, x: F32, ids: I32, routing: F32, w1: F64, w3: F64, limit: float
) -> None:
    """Model.md 4.7: u1 and u3 rounded to bf16, z rounded after the routing weight."""
    assert y.shape == (*ids.shape, w1.shape[1])
    for row in range(len(x)):
        wide = x[row].astype(np.float64)
        for place, expert in enumerate(ids[row]):
            u1, u3 = (
                bf16([math.fsum(wide * line) for line in w[expert]]).astype(np.float64)
                for w in (w1, w3)
            )
            gate, up = np.minimum(u1, limit), np.clip(u3, -limit, limit)
            z = float(routing[row, place]) * (gate / (1 + np.exp(-gate)) * up)
            assert_rounded(y[row, place], z, "bf16", 2.0**-20 * np.abs(z))


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize(("experts", "k"), [(8, 3), (3, 3), (8, 1)])
def test_against_the_definition(rng: np.random.Generator, rows: int, experts: int, k: int) -> None:
    x = through_q8(activations(rng, rows, 64, spread=1))
    w1, w3 = (fp4_weight(rng, experts, 32, 64) for _ in range(2))
    ids, routing = choices(rng, rows, experts, k), rng.random((rows, k)).astype(np.float32)
    y = ExpertsUp.reference(x, ids, routing, w1, w3, LIMIT)
    assert_by_definition(y, x, ids, routing, w1, w3, LIMIT)


def test_clamped_values(rng: np.random.Generator) -> None:
    """With a low limit most of both branches is cut."""
    x = through_q8(activations(rng, 4, 64) * 8)
    w1, w3 = (fp4_weight(rng, 4, 32, 64) for _ in range(2))
    ids, routing = choices(rng, 4, 4, 2), rng.random((4, 2)).astype(np.float32)
    y = ExpertsUp.reference(x, ids, routing, w1, w3, 0.5)
    assert_by_definition(y, x, ids, routing, w1, w3, 0.5)


def test_all_rows_may_choose_the_same_expert(rng: np.random.Generator) -> None:
    x = through_q8(activations(rng, 7, 64))
    w1, w3 = (fp4_weight(rng, 8, 32, 64) for _ in range(2))
    ids, routing = np.full((7, 1), 5, np.int32), np.ones((7, 1), np.float32)
    y = ExpertsUp.reference(x, ids, routing, w1, w3, LIMIT)
    assert_by_definition(y, x, ids, routing, w1, w3, LIMIT)


def test_the_weight_goes_in_before_the_rounding() -> None:
    """bf16(w * z) is not w * bf16(z): here w * z lies on another grid."""
    x = np.ones((1, 32), np.float32)
    w = np.zeros((1, 1, 32))
    w[0, 0, 0] = 1.0
    third = np.float32(1 / 3)
    y = ExpertsUp.reference(x, np.zeros((1, 1), np.int32), np.array([[third]]), w, w, LIMIT)
    z = 1 / (1 + math.exp(-1.0))
    assert_is_bf16(y)
    assert abs(y[0, 0, 0] - float(third) * z) <= bf16_ulp(float(third) * z) / 2 * (1 + 2.0**-10)


@every_choice
def test_rows_stand_alone(rng: np.random.Generator, choice: Choice) -> None:
    x = through_q8(activations(rng, 16, 256))
    w1, w3 = (fp4_weight(rng, 8, 64, 256) for _ in range(2))
    ids, routing = choices(rng, 16, 8, 3), rng.random((16, 3)).astype(np.float32)
    assert_rows_alone(
        lambda a, b, c: ExpertsUp.reference(a, b, c, w1, w3, LIMIT), [x, ids, routing], choice
    )


def test_a_place_does_not_see_the_others(rng: np.random.Generator) -> None:
    x = through_q8(activations(rng, 5, 64))
    w1, w3 = (fp4_weight(rng, 8, 32, 64) for _ in range(2))
    ids, routing = choices(rng, 5, 8, 3), rng.random((5, 3)).astype(np.float32)
    whole = ExpertsUp.reference(x, ids, routing, w1, w3, LIMIT)
    for k in range(3):
        one = ExpertsUp.reference(x, ids[:, k : k + 1], routing[:, k : k + 1], w1, w3, LIMIT)
        assert_same_bits(one[:, 0], whole[:, k])


def op(rows: int) -> ExpertsUp:
    """The release's."""
    w1, w3 = (weight(n, 384, 2304, 5120, dtype="fp4") for n in ("w1", "w3"))
    return ExpertsUp(
        scratch("x", rows, 5120),
        scratch("i", rows, 6, dtype="i32"),
        scratch("r", rows, 6, dtype="f32"),
        w1,
        w3,
        scratch("z", rows, 6, 2304),
        LIMIT,
    )


def test_launch() -> None:
    assert_launch(op(3), "experts_up", ("x", "i", "r", "w1", "w3", "z"), limit=LIMIT)


@pytest.mark.parametrize(("rows", "distinct"), [(1, 6), (7, 42), (100, 384)])
def test_cost_of_the_release(rows: int, distinct: int) -> None:
    """Two of the three matrices of an expert's 18,800,640 bytes; six experts a row, up to 384."""
    matrix = 2304 * 2560 + 2304 * 160
    assert 3 * matrix == 18_800_640
    activations_bytes = 2 * rows * 5120 + 2 * rows * 6 * 2304
    assert_cost(op(rows), distinct * 2 * matrix + activations_bytes, 2 * 2 * rows * 6 * 2304 * 5120)


def test_constants_of_the_kernels_are_those_of_the_geometry() -> None:
    text = "".join(
        (ptx.FOLDER / "uf" / f"{n}.cuh").read_text() for n in ("experts", "experts_wide")
    )
    found = dict(re.findall(r"(\w+) = (\d+)[,;]", text))
    names = ("LONG_BLOCKS", "PARTS", "NARROW_PAIRS", "RING", "CODES")
    kernel = {name: int(found[name]) for name in names}
    own, slab = experts_up, 2 * (kernel["CODES"] + 128)
    assert 32 * kernel["LONG_BLOCKS"] == own._LONG
    assert (kernel["PARTS"], kernel["NARROW_PAIRS"]) == (own._PARTS, own._NARROW_PAIRS)
    assert kernel["RING"] * (slab + 512) == own._NARROW_BYTES
    assert slab == own._SLAB


@pytest.mark.parametrize(
    ("rows", "depth", "units", "want"),
    [
        (1, 5120, 18, (18, 6, 256, 57344)),  # eight parts: a CTA a unit
        (7, 5120, 9, (9, 42, 256, 57344)),
        (7, 576, 80, (20, 42, 128, 28672)),  # one part: a warp a unit
        (256, 5120, 18, (18, 1536, 256, 57344)),
        # Rings of 5 stages, of 32 bf16 of each row and a slab for each warp; then a warp's sums.
        (257, 5120, 18, (6, 384 + 48, 96, 29440 + 24576)),
        (2048, 576, 80, (27, 384 + 384, 96, 29440)),
        (2049, 576, 80, (20, 384 + 192, 128, 46080)),
        (4096, 5120, 9, (3, 768, 128, 46080 + 65536)),
    ],
)
def test_how_experts_are_spread(
    rows: int, depth: int, units: int, want: tuple[int, int, int, int]
) -> None:
    pairs = rows * 6
    wide = wide_rows(pairs, 384)
    assert (wide is None) == (rows <= 256)
    count = num_chunks(pairs, 384, wide) if wide else 0
    chunks = scratch("c", count, 3, dtype="i32") if wide else None
    w = weight("w", 384, 64 * units, depth, dtype="fp4")
    g = experts_geometry(scratch("i", rows, 6, dtype="i32"), units, w, chunks)
    assert (g.x, g.y, g.threads, g.shared) == want
