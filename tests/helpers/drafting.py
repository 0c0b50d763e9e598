"""Drafting plans on one NumPy backend, driven step by step: what the engine does, without its
requests and without its choice of widths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from helpers.rig import TINY, Rig, assert_bits
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array
from ultraflash.runtime.interpret import NumpyRunner
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step

_DRAFT_WINDOW = re.compile(r"draft\.stage\d+\.ring_(?:codes|scales)")
GREEDY = Draw()


@dataclass(frozen=True)
class Behind:
    """What a step gave one sequence: drafts that stay, the token behind them, the next block."""

    accepted: int
    token: int
    drafts: tuple[int, ...]
    confidence: Array  # [B]
    logits: Array  # of this sequence's rows; a prefill has those of the last one


class DraftRig(Rig):
    """A `Rig` whose plans draft."""

    def __init__(
        self, block: int = 5, world: int = 1, checkpoint: Path = TINY, slots: int = 4
    ) -> None:
        super().__init__(checkpoint, world, slots)
        self.build = Build(self.model, self.capacity, world=world, block=block)
        self._drafting: dict[object, NumpyRunner] = {}

    def compiled(self, key: object, make: Callable[[], Plan]) -> NumpyRunner:
        """One runner for a key."""
        if key not in self._drafting:
            self._drafting[key] = self.backend.compile(make())
            write_constants(self._drafting[key])
        return self._drafting[key]

    def decoder(self, rows: int, sequences: int = 1) -> NumpyRunner:
        return self.compiled((rows, sequences), partial(build_decode, self.build, rows, sequences))

    def decode(self, *parts: Part, rows: int = 0, sequences: int = 0) -> list[Behind]:
        """A decode step, in a plan that the parts fill unless a larger one is asked for."""
        count = sum(len(part.ids) for part in parts)
        runner = self.decoder(rows or count, sequences or len(parts))
        return self.ran(runner, *parts)

    def prefill(self, slot: int, ids: Sequence[int], draw: Draw = GREEDY) -> Behind:
        """A whole prompt at once."""
        make = partial(build_prefill, self.build, len(ids))
        return self.ran(self.compiled(("prefill", len(ids)), make), Part(slot, 0, ids, draw))[0]

    def ran(self, runner: NumpyRunner, *parts: Part) -> list[Behind]:
        """What the step gives each part."""
        write_step(runner, parts)
        runner.run()
        return self.results(runner, *parts)

    def results(self, runner: NumpyRunner, *parts: Part) -> list[Behind]:
        """What the step that has just run gave each part."""
        accepted, token, drafts, confidence = (
            runner.read(f"io.{name}") for name in ("accepted", "token", "drafts", "confidence")
        )
        logits = self.logits(runner)
        each = runner.plan.sequences == len(logits) and runner.plan.rows != len(logits)
        ends = np.cumsum([1 if each else len(part.ids) for part in parts])
        rows = np.split(logits[: ends[-1]].copy(), ends[:-1])
        return [
            Behind(
                int(accepted[n]), int(token[n]), tuple(drafts[n].tolist()), confidence[n].copy(),
                rows[n],
            )
            for n in range(len(parts))
        ]  # fmt: skip

    def state(self, rank: int = 0) -> dict[str, Array]:
        """All state that outlives a step but what drafts were drawn from, by buffer."""
        state = self.backend._state[rank]
        return {n: a for n, a in state.items() if not re.match(r"draft\.q|replay\.|next\.", n)}

    def drawn_from(self, slot: int) -> Array:
        """The distributions of the drafts of a slot. [B, V]."""
        q: Array = self.backend._state[0]["draft.q"][slot]
        return q.copy()

    def _live_rows(self, name: str, length: int, size: int) -> Array:
        if _DRAFT_WINDOW.fullmatch(name):
            return np.arange(max(0, length - self.model.window), length) % size
        return super()._live_rows(name, length, size)


def assert_same_result(got: Behind, want: Behind, where: str = "") -> None:
    """Equal to the bit, logits and confidences included."""
    assert (got.accepted, got.token, got.drafts) == (want.accepted, want.token, want.drafts), where
    assert_bits(got.confidence, want.confidence, f"{where} confidence")
    assert_bits(got.logits, want.logits, f"{where} logits")
