"""Plans on one NumPy backend, driven row by row: what the engine does, without its requests.

`live` says which bytes of a sequence's state still matter at a length; tests compare those bit by
bit, whatever way led there.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array
from ultraflash.runtime.interpret import NumpyBackend, NumpyRunner
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights

TINY = Path(__file__).parents[1] / "golden" / "tiny-a" / "ckpt"
_RUNNERS = 12
STATE = re.compile(
    r"engram\.history|L(\d+)\.attn\.(ring|main|key|pending)_(?:codes|scales|kv|gate)"
)


class Rig:
    """One backend, its compiled plans by what they are for."""

    def __init__(self, checkpoint: Path = TINY, world: int = 1, slots: int = 6) -> None:
        self.model = Model.from_checkpoint(checkpoint)
        weights = load_weights(CheckpointIndex.open(checkpoint), self.model, world)
        self.backend = NumpyBackend(weights, world)
        self.capacity = Capacity(slots, max_seq=256)
        self._runners: OrderedDict[tuple[str, int, int, bool], NumpyRunner] = OrderedDict()

    def runner(self, kind: str, rows: int, sequences: int, rounded: bool = False) -> NumpyRunner:
        """The compiled plan; `rounded` attention weights are bf16 as the reference has them."""
        key = kind, rows, sequences, rounded
        runner = self._runners.pop(key, None)
        if runner is None:
            model, world = self.model, self.backend.world
            build = Build(model, self.capacity, world=world, round_attention=rounded)
            if kind == "decode":
                plan = build_decode(build, rows, sequences)
            else:
                plan = build_prefill(build, rows)
            runner = self.backend.compile(plan)
            write_constants(runner)
        self._runners[key] = runner
        if len(self._runners) > _RUNNERS:  # each keeps what its latest step computed
            self._runners.popitem(last=False)
        return runner

    def step(
        self,
        parts: Sequence[Part],
        rows: int | None = None,
        sequences: int | None = None,
        rounded: bool = False,
    ) -> list[Array]:
        """Logits [n, V] of each part's rows, from a decode plan of at least that many rows."""
        counts = [len(part.ids) for part in parts]
        runner = self.runner(
            "decode", rows or sum(counts), sequences or len(parts), rounded=rounded
        )
        write_step(runner, parts)
        runner.run()
        ends = np.cumsum(counts)
        return np.split(self.logits(runner)[: ends[-1]].copy(), ends[:-1])

    def extend(self, slot: int, start: int, ids: Sequence[int], rounded: bool = False) -> Array:
        """Logits [n, V] of more rows of one sequence, in a plan that they fill."""
        return self.step([Part(slot, start, ids)], rounded=rounded)[0]

    def prefill_chunk(
        self, slot: int, start: int, ids: Sequence[int], rows: int, rounded: bool = False
    ) -> Array:
        """Logits [V] of the last of `ids`, from a prefill plan whose further rows are idle."""
        runner = self.runner("prefill", rows, 1, rounded=rounded)
        write_step(runner, [Part(slot, start, ids)])
        runner.run()
        return self.logits(runner)[0].copy()

    def logits(self, runner: NumpyRunner, rank: int = 0) -> Array:
        """Logits of the runner's latest step over the whole vocabulary."""
        whole = "head.logits" if self.backend.world == 1 else "head.logits_all"
        return runner.read(whole, rank)

    def state(self, rank: int = 0) -> dict[str, Array]:
        """All state of all slots, by buffer."""
        runner = self.runner("decode", 1, 1)
        return {ref.name: runner.read(ref.name, rank) for ref in runner.plan.of_life(Life.STATE)}

    def live(self, slot: int, length: int, rank: int = 0) -> dict[str, Array]:
        """A copy of every byte of state that a sequence of `length` tokens in `slot` depends on,
        whatever its last step was."""
        return {
            name: array[slot][self._live_rows(name, length, array.shape[1])].copy()
            for name, array in self.state(rank).items()
            if not name.startswith("next.")
        }

    def _live_rows(self, name: str, length: int, size: int) -> Array:
        found = STATE.fullmatch(name)
        assert found, f"state {name} is unknown here: say which of its rows are live"
        if name == "engram.history":
            return np.arange(max(0, length - self.model.engram_max_order + 1), length) % size
        layer, kind = int(found[1]), found[2]
        if kind == "ring":
            return np.arange(max(0, length - self.model.window), length) % size
        if kind == "pending":
            return np.arange(length - length % 2, length) % size
        return np.arange(length // self.model.ratio(layer))


def assert_same_bits(got: dict[str, Array], want: dict[str, Array], where: str = "") -> None:
    """Equal names, types, shapes and bytes; the message names buffer and row."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_bits(got[name], value, f"{where} {name}")


def assert_bits(got: Array, want: Array, where: str = "") -> None:
    """Equal type, shape and bytes."""
    assert got.dtype == want.dtype, where
    assert got.shape == want.shape, where
    if got.tobytes() != want.tobytes():
        rows = np.flatnonzero([a.tobytes() != b.tobytes() for a, b in zip(got, want, strict=True)])
        raise AssertionError(f"{where}: {len(rows)} of {len(want)} rows differ, first {rows[0]}")
