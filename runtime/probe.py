"""The engine opened up for tests: run sequences, force single layers, read every buffer.

What `tools/check_golden` and an independent comparer drive. A probe runs the plans that the engine
runs, on the same backend; it has no request handling and no sampling. Single parts (quantisers,
tables, gate) are in `probe_parts.py`; how a call's buffers are read is in `probe_values.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ultraflash.graphs.capacity import MAX_ROWS, Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Life, Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.rows import I32
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array, Backend, Bytes, Runner
from ultraflash.runtime.backends import open_backend
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.probe_parts import ProbeParts
from ultraflash.runtime.probe_values import ProbeValues
from ultraflash.runtime.resume import Kind
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import Weights, load_weights

_SLOTS = 4  # sequences that a probe keeps at once; the oldest one makes room
_RUNNERS = 12


@dataclass
class ProbeState:
    """One sequence: where it lives, how many rows are committed, and the rows of the call under
    way.
    """

    slot: int
    length: int = 0
    reach: int = 0  # rows ever written, rejected ones included: rings hold only the last of these
    pending: tuple[int, ...] = ()
    runner: Runner | None = field(default=None, repr=False)


class Probe(ProbeParts):
    """A checkpoint ready to be looked into. bf16 values are float32 arrays; rank 0's view of every
    buffer.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        parts: Weights,
        tokenizer: Tokenizer,
        max_seq: int,
        bf16_weights: bool,
    ) -> None:
        """Use `open`."""
        super().__init__(model, backend, parts, tokenizer)
        self._build = Build(
            model,
            Capacity(_SLOTS, max_seq),
            backend.world,
            model.draft_block if model.draft_stages else 0,
            bf16_weights,
        )
        self._runners: OrderedDict[tuple[str, int], Runner] = OrderedDict()
        self._slots: OrderedDict[int, ProbeState | None] = OrderedDict(
            (i, None) for i in range(_SLOTS)
        )

    @classmethod
    def open(
        cls,
        checkpoint: Path,
        backend: str = "numpy",
        world: int = 1,
        max_seq: int = 512,
        attention_weights: str = "bf16",
    ) -> Probe:
        """Load a checkpoint.

        Raises:
            EngineError: when it cannot be loaded, or there is no such backend here. WorldError:
            when it cannot be split over `world` ranks.
        """
        checkpoint = Path(checkpoint)
        model, index = Model.from_checkpoint(checkpoint), CheckpointIndex.open(checkpoint)
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        config = RuntimeConfig.from_env(
            checkpoint=checkpoint, backend=backend, world=world, check=backend == "numpy"
        )
        made = open_backend(config, index, model, keep_scratch=True)
        parts = load_weights(index, model, 1, names=ProbeParts.weights_of(model))
        return cls(model, made, parts, tokenizer, max_seq, attention_weights == "bf16")

    # --- sequences ---

    def prefill(self, ids: Sequence[int]) -> tuple[ProbeState, F32]:
        """A fresh sequence, and logits [P, V] of all positions."""
        state = self._fresh()
        return state, self.extend(state, ids)

    def extend(self, state: ProbeState, ids: Sequence[int]) -> F32:
        """Logits [T, V] of T more rows."""
        runner = self._start(state, ids)
        runner.run()
        state.length += len(ids)
        state.reach = max(state.reach, state.length)
        return self._values(runner).logits()

    def prompt(self, ids: Sequence[int], chunk: int) -> tuple[ProbeState, F32]:
        """A fresh sequence through the plans of chunks of `chunk` rows, as the engine takes a
        prompt; logits [1, V] behind its last row.
        """
        state = self._fresh()
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            kind = "prefill" if start + chunk >= len(ids) else "prefill_part"
            runner = self._start(state, part, kind, chunk)
            runner.run()
            state.length = state.reach = start + len(part)
        assert state.runner is not None
        return state, self._values(state.runner).logits()

    def rollback(self, state: ProbeState, length: int) -> None:
        """Forget all rows from position `length` on: state is addressed by position, so only the
        number changes.

        Raises:
            DeviceError: further back than the rings reach.
        """
        self._alive(state)
        furthest = max(0, state.reach - 2 * MAX_ROWS)
        if not furthest <= length <= state.length:
            raise DeviceError(
                f"cannot roll back from {state.length} rows to {length}: "
                f"rings reach back to {furthest}"
            )
        state.length = length

    def snapshot(self, state: ProbeState) -> tuple[int, Bytes, Bytes]:
        """A sequence as it would leave the machine: its length, restore point and global KV."""
        self._alive(state)
        layout, slot, length = self._layout(), state.slot, state.length
        return (
            length,
            layout.export_point(self.backend, slot, length, Kind.FULL),
            layout.export_segment(self.backend, slot, 0, length),
        )

    def restore(self, snapshot: tuple[int, Bytes, Bytes]) -> ProbeState:
        """A fresh sequence that goes on from a snapshot.

        Raises:
            SnapshotError: when it was taken of another model.
        """
        length, point, segment = snapshot
        layout, state = self._layout(), self._fresh()
        layout.restore(self.backend, state.slot, length, point, [segment])
        state.length = state.reach = length
        return state

    def trace(self, ids: Sequence[int]) -> dict[str, Array]:
        """Choices of a free prefill: `L{L}.expert_ids` [P, k], `L{L}.sel` [P, K], `pool` [P, n]."""
        state, _ = self.prefill(ids)
        assert state.runner is not None
        return self._values(state.runner).choices(len(ids))

    def buffer(self, state: ProbeState, name: str, rank: int = 0) -> Array:
        """Any buffer of the state's latest call by its plan name."""
        if state.runner is None:
            raise DeviceError("this sequence has run nothing yet")
        return state.runner.read(name, rank)

    # --- forced layers ---

    def begin(self, ids: Sequence[int]) -> ProbeState:
        """A fresh sequence whose first call `forced_layer` will drive."""
        state = self._fresh()
        self._start_forced(state, ids)
        return state

    def advance(self, state: ProbeState, ids: Sequence[int]) -> None:
        """Commit the rows of the call under way and start the next one."""
        assert state.runner is not None
        if self.model.engram_layers:
            state.runner.run(state.runner.plan.span("step_end.engram"))
        state.length += len(state.pending)
        state.reach = max(state.reach, state.length)
        self._start_forced(state, ids)

    def forced_layer(
        self, state: ProbeState, layer: int, stream: F32 | None, pre: F32 | None, sel: I32 | None
    ) -> dict[str, Array]:
        """Run one layer of the call under way, its Engram included, from a given stream.

        Attention uses `sel`, at index sources too; the layer's own choice comes back as `sel`.
        Keys: see `tools/golden/probe.py`.
        """
        self._alive(state)
        assert state.runner is not None
        runner, model = state.runner, self.model
        source = "embed" if layer == 0 else f"L{layer - 1}"
        self._put_streams(runner, layer, source, stream, pre)
        span, own = runner.plan.span(f"L{layer}"), None
        if sel is not None and model.ratio(layer):
            if layer in model.index_sources:
                split = runner.plan.span(f"L{layer}.attn.select").stop
                runner.run(slice(span.start, split))
                own, span = runner.read(f"L{layer}.attn.sel"), slice(split, span.stop)
            runner.write(f"L{model.index_source(layer)}.attn.sel", _fit(sel, model.index_topk))
        runner.run(span)
        end = state.length + len(state.pending)
        return self._values(runner).layer(layer, state.length, end, own)

    def forced_head(self, state: ProbeState, stream: F32, pre: F32) -> dict[str, Array]:
        """`head_in` [T, D] and `logits` [T, V] of a given stream that leaves the last layer."""
        self._alive(state)
        assert state.runner is not None
        self._put_streams(
            state.runner, self.model.num_layers, f"L{self.model.num_layers - 1}", stream, pre
        )
        state.runner.run(state.runner.plan.span("head"))
        return {
            "head_in": state.runner.read("head.in"),
            "logits": self._values(state.runner).logits(),
        }

    def caches(self, state: ProbeState) -> dict[str, Array]:
        """What all rows so far left, those of a forced call under way included, de-quantised; keys
        as in the vectors.
        """
        self._alive(state)
        assert state.runner is not None
        return self._values(state.runner).caches(state.slot, state.length + len(state.pending))

    # --- drafting ---

    def taps(self, ids: Sequence[int]) -> F32:
        """The drafting input of every row of a fresh sequence, [P, targets*D]."""
        state, _ = self.prefill(ids)
        return self.buffer(state, self._tap)

    def draft(self, state: ProbeState | None, taps: F32, anchor: int) -> dict[str, Any]:
        """Feed taps [T, targets*D] at a sequence's next positions, then propose behind them.

        `state` None starts a sequence. Keys: `state`, `main_x` [T, D], `tokens` [1+B], `h` [B, D],
        `logits_before_markov`, `logits` [B, V], `confidence` [B]; `stage{k}.X` and the like for
        every draft stage.
        """
        state = state or self._fresh()
        runner = self._start(state, [0] * len(taps))
        runner.run(runner.plan.span("step"))
        runner.write(self._tap, taps)
        runner.run(runner.plan.span("context"))
        runner.write("io.token", np.array([anchor]))
        runner.write("io.accepted", np.array([len(taps) - 1]))
        runner.run(runner.plan.span("draft"))
        state.length += len(taps)
        found = self._values(runner).draft(state.slot, state.length, self._build.block, anchor)
        return {"state": state, **found}

    @property
    def _tap(self) -> str:
        return f"L{max(self.model.draft_targets)}.tap"

    # --- inside ---

    def _fresh(self) -> ProbeState:
        slot, _ = self._slots.popitem(last=False)
        state = ProbeState(slot)
        self._slots[slot] = state
        self.backend.clear_slot(slot)
        return state

    def _alive(self, state: ProbeState) -> None:
        if self._slots[state.slot] is not state:
            raise DeviceError(f"this sequence made room for a newer one: a probe keeps {_SLOTS}")
        self._slots.move_to_end(state.slot)

    def _runner(self, kind: str, rows: int) -> Runner:
        runner = self._runners.pop((kind, rows), None)
        if runner is None:
            runner = self.backend.compile(self._plan(kind, rows))
            write_constants(runner)
        self._runners[kind, rows] = runner
        if len(self._runners) > _RUNNERS:
            self._runners.popitem(last=False)
        return runner

    def _plan(self, kind: str, rows: int) -> Plan:
        if kind == "decode":
            return build_decode(self._build, rows, 1)
        return build_prefill(self._build, rows, ends=kind == "prefill")

    def _values(self, runner: Runner) -> ProbeValues:
        return ProbeValues(self.model, runner, self.backend.world)

    def _layout(self) -> Layout:
        return Layout.of(self.model, self._runner("decode", 1).plan.of_life(Life.STATE))

    def _start(
        self, state: ProbeState, ids: Sequence[int], kind: str = "decode", rows: int | None = None
    ) -> Runner:
        self._alive(state)
        end = state.length + len(ids)
        if end > self._build.capacity.max_seq:
            raise DeviceError(
                f"{end} positions are more than the {self._build.capacity.max_seq} "
                f"this probe was opened for"
            )
        state.runner = self._runner(kind, rows or len(ids))
        write_step(state.runner, [Part(state.slot, state.length, ids)])
        return state.runner

    def _start_forced(self, state: ProbeState, ids: Sequence[int]) -> None:
        # A runner of its own: a forced call spans several method calls, others may run the same
        # plan in between.
        self._runners.pop(("decode", len(ids)), None)
        runner = self._start(state, ids)
        self._runners.pop(("decode", len(ids)), None)
        state.pending = tuple(ids)
        runner.run(runner.plan.span("step"))

    def _put_streams(
        self, runner: Runner, layer: int, source: str, stream: F32 | None, pre: F32 | None
    ) -> None:
        names = ("embed.x", "embed.pre") if layer == 0 else (f"{source}.X", f"{source}.ffn.pre")
        for name, value in zip(names, (stream, pre), strict=True):
            if value is not None:
                runner.write(name, value)


def _fit(sel: Array, k: int) -> I32:
    """A selection padded with -1 to k columns."""
    out = np.full((len(sel), k), -1, np.int32)
    out[:, : sel.shape[1]] = sel
    return out
