"""Attention and its index at the end of a million tokens, and with as many rows as a prompt has."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.device_cases import cases
from helpers.device_inputs import make_inputs
from helpers.device_ops import Ops, run_case
from helpers.device_weights import Shelf
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Life, Plan, Ref
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build

pytestmark = pytest.mark.gpu

SLOTS = 9  # the last one's entries stand behind 2^31 bytes
FEW = ("IndexScores", "SelectTopk", "CandidatePool")


def release(world: int, max_seq: int, slots: int = SLOTS) -> Build:
    return Build(release_model(), Capacity(slots, max_seq), world, block=5)


def of_kind(plan: Plan, kind: str) -> list[Any]:
    """Cases of one operation of a plan."""
    return [case for case in cases([("far", plan)]) if type(case.op).__name__ == kind]


@pytest.mark.parametrize("kind", [*FEW, "Attention"])
def test_a_million_tokens(ops: Ops, shelf: Shelf, kind: str) -> None:
    """Every slot; where the reference takes seconds a row, two of them."""
    rows = 2 if kind in FEW else SLOTS
    chosen = of_kind(build_decode(release(8, 1 << 20), rows, rows), kind)
    assert chosen
    ops.prepare(chosen)
    for case in chosen:
        run_case(ops, case, shelf)


@pytest.mark.parametrize("kind", ["Attention", "IndexScores", "SelectTopk", "CandidatePool"])
@pytest.mark.parametrize("world", [1, 4, 8])
def test_rows_of_a_chunk(ops: Ops, shelf: Shelf, kind: str, world: int) -> None:
    """More rows than clusters are made for: one CTA a row, and tiles of rows."""
    chosen = of_kind(build_prefill(release(world, 32768, slots=3), 40), kind)
    assert chosen
    ops.prepare(chosen)
    for case in chosen:
        run_case(ops, case, shelf)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_row_alone_has_the_bits_of_the_chunk(
    ops: Ops, shelf: Shelf, world: int, rounded: bool
) -> None:
    """A cluster's groups add up as one CTA's do."""
    for case in of_kind(build_prefill(release(world, 32768, slots=3), 40), "Attention"):
        op = replace(case.op, round_weights=rounded)
        made = make_inputs(op, case.rng(1), shelf)
        # Every row but itself from the ring.
        made["row_start"], made["position"] = np.array([0, 1], np.int32), made["position"] | 1023
        made["window_start"][:] = 0
        whole = ops.run(op, made)["y"]
        for row in (0, 17, 39):
            few: dict[str, Any] = {
                f.name: replace(value, shape=(1, *value.shape[1:]))
                for f in fields(op)
                if isinstance(value := getattr(op, f.name), Ref)
                and value.life is not Life.STATE
                and value.shape[0] == 40
            }
            alone = {name: made[name][row : row + 1] for name in few if name in made}
            assert_same_bits(ops.run(replace(op, **few), made | alone)["y"][0], whole[row])
