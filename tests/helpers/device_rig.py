"""The tiny model on the device, driven row by row: plans by their width, results, live state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.device import BACKEND
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Backend, Runner
from ultraflash.runtime.backends import open_backend
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex

Array = npt.NDArray[Any]
State = dict[str, bytes]

TINY = Path(__file__).parents[1] / "golden" / "tiny-a" / "ckpt"
BLOCK, CHUNK = 7, 16
OF_SEQUENCE = ("token", "accepted", "drafts", "confidence")
OF_ROW = ("logprob", "top_ids", "top_logprobs")
_STATE = re.compile(r"L(\d+)\.attn\.(ring|main|key|pending)_\w+|draft\.stage\d+\.(ring)_\w+")


@dataclass
class Outcome:
    """What a step said of one sequence: by buffer name, rows of its own only."""

    values: dict[str, Array]

    @property
    def token(self) -> int:
        return int(self.values["token"])

    @property
    def accepted(self) -> int:
        return int(self.values["accepted"])

    @property
    def drafts(self) -> list[int]:
        found: list[int] = self.values["drafts"].tolist()
        return found


class DeviceRig:
    """One backend, its compiled plans by what they are for.

    `kept`: scratch is not shared between buffers, so that logits can be read.
    """

    def __init__(
        self, *, kept: bool, slots: int = 6, max_seq: int = 256, block: int = BLOCK,
        backend: Backend | None = None,
    ) -> None:  # fmt: skip
        """On the first GPU, or on a `backend` of several ranks."""
        self.kept, self.model = kept, Model.from_checkpoint(TINY)
        config = RuntimeConfig.from_env(checkpoint=TINY, backend=BACKEND)
        prepare_cache_dir(config)
        index = CheckpointIndex.open(TINY)
        self.backend = backend or open_backend(config, index, self.model, keep_scratch=kept)
        self.build = Build(self.model, Capacity(slots, max_seq), self.backend.world, block)
        self._runners: dict[tuple[str, int, int], Runner] = {}

    def runner(self, kind: str, rows: int, sequences: int = 1) -> Runner:
        """The compiled plan."""
        key = kind, rows, sequences
        if key not in self._runners:
            if kind == "decode":
                plan = build_decode(self.build, rows, sequences)
            else:
                plan = build_prefill(self.build, rows, ends=kind == "prefill")
            self._runners[key] = self.backend.compile(plan)
            write_constants(self._runners[key])
        return self._runners[key]

    def step(
        self, parts: Sequence[Part], rows: int | None = None, sequences: int | None = None,
        span: slice | None = None,
    ) -> list[Outcome]:  # fmt: skip
        """A decode step of at least as many rows and sequences as the parts have.

        `span` launches nodes one by one instead of replaying the graph.
        """
        used = sum(len(part.ids) for part in parts)
        runner = self.runner("decode", rows or used, sequences or len(parts))
        write_step(runner, parts)
        runner.run(span)
        return self.outcomes(runner, parts)

    def prompt(self, slot: int, ids: Sequence[int], draw: Draw = Draw()) -> Outcome:  # noqa: B008
        """A prompt in chunks, as the engine prefills; what came behind its last row."""
        for start in range(0, len(ids), CHUNK):
            part = Part(slot, start, ids[start : start + CHUNK], draw)
            last = start + CHUNK >= len(ids)
            runner = self.runner("prefill" if last else "prefill_part", CHUNK)
            write_step(runner, [part])
            runner.run()
        return Outcome({name: runner.read(f"io.{name}")[0].copy() for name in OF_SEQUENCE})

    def outcomes(self, runner: Runner, parts: Sequence[Part]) -> list[Outcome]:
        """What the runner's latest step said of each part."""
        whole = {name: runner.read(f"io.{name}") for name in OF_SEQUENCE}
        by_row = {name: runner.read(f"io.{name}") for name in OF_ROW}
        if self.kept:
            whole_logits = "head.logits" if self.backend.world == 1 else "head.logits_all"
            by_row["logits"] = runner.read(whole_logits)
        found, at = [], 0
        for number, part in enumerate(parts):
            own = slice(at, at + len(part.ids))
            values = {name: array[number].copy() for name, array in whole.items()}
            values |= {name: array[own].copy() for name, array in by_row.items()}
            found.append(Outcome(values))
            at = own.stop
        return found

    def live(self, slot: int, length: int, drawn: bool = False) -> State:
        """Every byte of state that a sequence of `length` tokens in `slot` depends on, whatever its
        last step was.

        `drawn`: with what its drafts were drawn from.
        """
        state: State = {}
        for ref in self.runner("decode", 1).plan.of_life(Life.STATE):
            if ref.name.startswith("next.") or (ref.name == "draft.q" and not drawn):
                continue
            rows = self.backend.read_state(ref.name, slot, 0, ref.shape[1])
            state[ref.name] = rows[self._live_rows(ref.name, length, ref.shape[1])].tobytes()
        return state

    def everything(self) -> State:
        """All state of all slots."""
        refs = self.runner("decode", 1).plan.of_life(Life.STATE)
        return {
            ref.name: b"".join(
                self.backend.read_state(ref.name, slot, 0, ref.shape[1]).tobytes()
                for slot in range(ref.shape[0])
            )
            for ref in refs
        }

    def _live_rows(self, name: str, length: int, size: int) -> Array:
        if name == "draft.q":
            return np.arange(size)
        if name == "engram.history":
            return np.arange(max(0, length - self.model.engram_max_order + 1), length) % size
        found = _STATE.fullmatch(name)
        assert found, f"state {name} is unknown here: say which of its rows are live"
        if found[3] or found[2] == "ring":
            return np.arange(max(0, length - self.model.window), length) % size
        if found[2] == "pending":
            return np.arange(length - length % 2, length) % size
        return np.arange(length // self.model.ratio(int(found[1])))


def assert_same_state(got: State, want: State, where: str) -> None:
    """Byte for byte; the message names buffers."""
    assert got.keys() == want.keys()
    wrong = [name for name in want if got[name] != want[name]]
    assert not wrong, f"{where}: {len(wrong)} of {len(want)} buffers differ, first {wrong[0]}"


def assert_same_outcome(got: Outcome, want: Outcome, where: str) -> None:
    """Byte for byte; the message names the value."""
    assert got.values.keys() == want.values.keys()
    wrong = [name for name, value in want.values.items()
             if got.values[name].tobytes() != value.tobytes()]  # fmt: skip
    assert not wrong, f"{where}: {', '.join(wrong)} differ"
