"""Contexts of a million tokens, and memory as the plans predict it. Synthetic weights."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from helpers.device import report
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.prefill import build_prefill
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.plans import Plans
from ultraflash.runtime.step_io import Part
from ultraflash.tools.shard import SLOT, Shard, open_shard

pytestmark = pytest.mark.gpu

CONTEXT = 1 << 20
WITHIN = 0.02


def options(**values: object) -> argparse.Namespace:
    plain = {"config": "checkpoint", "checkpoint": BUNDLED_CHECKPOINT, "weights": "synthetic",
             "world": 1, "rank": 0, "hop_us": 2.0, "block": None}  # fmt: skip
    return argparse.Namespace(**plain | values)


def shard(full: bool) -> Shard:
    if full:
        return open_shard(options(config="full", world=8), CONTEXT)
    small = open_shard(options(), 8192)  # the tiny model's own limit is text: state goes beyond it
    build = replace(small.build, capacity=Capacity(2, CONTEXT))
    return replace(small, build=build, plans=Plans(build, small.backend, small.config))


@pytest.mark.parametrize("full", [False, True], ids=["tiny", "released, world 8"])
def test_a_million_tokens_take_what_was_predicted(full: bool) -> None:
    opened = shard(full)
    plans = [opened.decode_runner(rows).plan for rows in (1, 4, 8)]
    opened.fill_state(plans[0])
    for rows in (1, 4, 8):
        ids = list(range(3, 3 + rows))
        (result,) = opened.plans.decode([Part(SLOT, CONTEXT - rows, ids)])
        assert 0 <= result.token < opened.model.vocab
        assert np.isfinite(result.confidence).all()
    prompt = opened.compile(build_prefill(opened.build, 128, ends=False))
    predicted, taken = opened.memory([*plans, prompt.plan])
    report(f"{opened.title}: {predicted:,} bytes predicted, {taken:,} taken")
    assert taken == pytest.approx(predicted, rel=WITHIN)
