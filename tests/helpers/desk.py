"""Sequences in the slots of one NumPy backend, run step by step without an engine.

What an engine does with a session, in the open: rows go in, logits, tokens and drafts come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array
from ultraflash.runtime.interpret import NumpyBackend, NumpyRunner
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights

TINY = Path(__file__).parents[1] / "golden" / "tiny-a" / "ckpt"
VOCAB = 512


@dataclass(frozen=True)
class Outcome:
    """What a step gave one part."""

    logits: Array  # [rows, V]
    accepted: int
    token: int
    drafts: tuple[int, ...]
    confidence: Array


class Desk:
    """One backend and its decode plans; the layout of its slots as bytes."""

    def __init__(self, world: int = 1, slots: int = 6, block: int = 5) -> None:
        self.model = Model.from_checkpoint(TINY)
        weights = load_weights(CheckpointIndex.open(TINY), self.model, world)
        self.backend = NumpyBackend(weights, world)
        self._build = Build(self.model, Capacity(slots, 256), world, block)
        self._runners: dict[tuple[int, int], NumpyRunner] = {}
        state = self.runner(1, 1).plan.of_life(Life.STATE)
        self.layout = Layout.of(self.model, state)

    def runner(self, rows: int, sequences: int) -> NumpyRunner:
        key = rows, sequences
        if key not in self._runners:
            self._runners[key] = self.backend.compile(build_decode(self._build, rows, sequences))
            write_constants(self._runners[key])
        return self._runners[key]

    def step(self, *parts: Part) -> list[Outcome]:
        """One decode step, in a plan that the parts fill."""
        runner = self.runner(sum(len(p.ids) for p in parts), len(parts))
        write_step(runner, parts)
        runner.run()
        name = "head.logits" if self.backend.world == 1 else "head.logits_all"
        ends = np.cumsum([len(p.ids) for p in parts])[:-1]
        logits = np.split(runner.read(name).copy(), ends)
        io = {n: runner.read(f"io.{n}").copy() for n in ("accepted", "token", "drafts")}
        confidence = runner.read("io.confidence").copy()
        return [
            Outcome(
                logits[i],
                int(io["accepted"][i]),
                int(io["token"][i]),
                tuple(io["drafts"][i].tolist()),
                confidence[i],
            )
            for i in range(len(parts))
        ]

    def extend(
        self, slot: int, start: int, ids: Sequence[int], draw: Draw | None = None
    ) -> Outcome:
        """More rows of one sequence."""
        return self.step(Part(slot, start, ids, draw or Draw()))[0]

    def scramble(self, slot: int) -> None:
        """Leave plausible rubbish in every row of a slot, as somebody else's conversation would."""
        for rank in range(self.backend.world):
            rng = np.random.default_rng(slot)  # the ranks hold the same
            for ref in self.runner(1, 1).plan.of_life(Life.STATE):
                rows = self.backend.state(ref, rank)[slot]
                if rows.dtype.kind == "f":
                    rows[:] = rng.normal(size=rows.shape)
                else:
                    rows[:] = rng.integers(90, 125, rows.shape)  # no NaN among codes and scales


def some_ids(number: int, count: int) -> list[int]:
    """The first ids of a sequence by its number."""
    ids: list[int] = np.random.default_rng(number).integers(3, 480, count).tolist()
    return ids
