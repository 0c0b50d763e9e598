"""The compiled plans of one engine, made when first needed: decode widths, prefill chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.served import Served
from ultraflash.graphs.step import Build
from ultraflash.graphs.width import Rule
from ultraflash.runtime.backend import Backend, Runner
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.step_io import Desk, Part, write_constants


class Result(NamedTuple):
    """What a step gave one sequence: drafts that stay, the token behind them, the next ones."""

    accepted: int
    token: int
    drafts: tuple[int, ...]
    confidence: tuple[float, ...]  # of the drafts, before the sigmoid
    kept: int = 0  # drafts that were verified


class _Next(NamedTuple):
    """Where a slot's next step begins, as the device keeps it."""

    start: int
    step: int
    ids: list[int]


class _Step(NamedTuple):
    """A step that is under way."""

    runner: Runner
    place: int  # of its record


_NOTHING = _Next(-1, 0, [])


def _nothing() -> None:
    """What a host does that has nothing to do."""


def served(config: RuntimeConfig) -> Served:
    """The plans that an engine with these settings may run."""
    return Served(
        range(1, config.max_rows + 1),
        range(1, config.max_sequences + 1),
        config.prefill_chunks,
        config.prefill,
        config.tail,
    )


class Plans:
    """Runs parts of sequences through the plan that fits them."""

    def __init__(self, build: Build, backend: Backend, config: RuntimeConfig) -> None:
        """Nothing is compiled yet."""
        self._build, self._backend, self._config = build, backend, config
        self._runners: dict[tuple[str, int, int], Runner] = {}
        self._desks: dict[Runner, Desk] = {}
        self._next: dict[int, _Next] = {}  # by slot
        self._ahead: _Step | None = None  # before anybody asked for it
        self._last: Runner | None = None  # of the latest step that has ended

    def decode(
        self, parts: list[Part], rule: Rule | None = None, ahead: int = 0,
        meanwhile: Callable[[], None] = _nothing,
    ) -> list[Result]:  # fmt: skip
        """A decode step of all parts together, of as many drafts as `rule` says; None: of all.

        `ahead`, if not 0: unless a result ends it, the next step will be one of the same sequences,
        and all that it needs is on the device. Then it is queued behind this one before anybody
        waits, and decides by `rule`, too, with room for so many rows.

        Who asks for another step after all has lost some time, and what drafts of these sequences
        were drawn from. Their state is whole: what a step changes is addressed by position, so that
        its rows are like rejected ones, which rings have room for (`Capacity.ring`).

        `meanwhile`: what the host does while it would wait for the device.
        """
        step = self._begun(parts, rule)
        self._ahead = None
        if ahead and rule and self._backend.places > 1:
            self._ahead = self._queued(step, parts, rule, ahead)
        meanwhile()
        return self._ended(step, parts)

    @property
    def took_ms(self) -> float:
        """Milliseconds of the latest step by the runner's clock, without the wait for the host."""
        began, ended = self._last.times_ns if self._last else (0, 0)
        return 1e-6 * (ended - began)

    def settle(self) -> None:
        """Wait for a step that was queued ahead; nobody will ask for it."""
        if self._ahead:
            self._ahead.runner.wait(self._ahead.place)
            self._ahead = None
            self._next.clear()  # of its sequences the device expects what nobody knows

    def prefill(self, part: Part, ends: bool) -> Result | None:
        """A chunk of a prompt through all layers; a result only if the prompt ends with it."""
        results = self._run(self.prefill_runner(self._chunk(part), ends), [part])
        return results[0] if ends else None

    def encode(self, part: Part) -> None:
        """A chunk of a prompt through the encoder alone (modes ced20 and ced21)."""
        self._run(self.encode_runner(self._chunk(part)), [part])

    def replay(self, part: Part) -> Result:
        """The decoder over the last rows of an encoded prompt; windows start with the part."""
        return self._run(self.replay_runner(), [part._replace(window_start=part.start)])[0]

    def prepare(self) -> None:
        """Compile and capture all plans now, so that no step waits for it or lacks the memory.

        Raises:
            EngineError: when a kernel does not compile or memory does not suffice.
        """
        for plan in served(self._config).plans(self._build):
            key = plan.name, plan.rows, plan.sequences
            if key not in self._runners:
                self._runners[key] = self._compile(plan)
            self._runners[key].prepare()

    def representative(self) -> list[Plan]:
        """Plans that decide the bits of state: a decode plan first, then those of every chunk."""
        chunks = self._config.prefill_chunks
        plans = [self.decode_runner(1, 1).plan]
        plans += [self.prefill_runner(rows, True).plan for rows in chunks]
        if self._config.prefill != "full":
            plans += [self.encode_runner(rows).plan for rows in chunks]
            plans.append(self.replay_runner().plan)
        return plans

    def decode_runner(self, rows: int, sequences: int) -> Runner:
        """The decode plan for this many rows and sequences."""
        return self._runner(
            ("decode", rows, sequences), partial(build_decode, self._build, rows, sequences)
        )

    def prefill_runner(self, rows: int, ends: bool) -> Runner:
        """The plan for a chunk of this many rows through all layers."""
        return self._runner(
            ("prefill" if ends else "prefill_part", rows, 1),
            partial(build_prefill, self._build, rows, ends=ends),
        )

    def encode_runner(self, rows: int) -> Runner:
        """The plan for a chunk of this many rows through the encoder."""
        mode, tail = self._config.prefill, self._config.tail
        return self._runner(
            (f"encode_{mode}", rows, 1), partial(build_encode, self._build, mode, tail, rows)
        )

    def replay_runner(self) -> Runner:
        """The plan for the tail of an encoded prompt."""
        mode, tail = self._config.prefill, self._config.tail
        return self._runner(
            (f"replay_{mode}", tail, 1), partial(build_replay, self._build, mode, tail)
        )

    def _chunk(self, part: Part) -> int:
        return next(n for n in self._config.prefill_chunks if n >= len(part.ids))

    def _runner(self, key: tuple[str, int, int], build: Callable[[], Plan]) -> Runner:
        """The runner of a plan that has this name, rows and sequences."""
        if key not in self._runners:
            self._runners[key] = self._compile(build())
        return self._runners[key]

    def _follows(self, part: Part) -> bool:
        """Whether a part is what the device expects of its slot."""
        start, step, ids = self._next.get(part.slot, _NOTHING)
        return start == part.start and step == part.draw.step and ids[: len(part.ids)] == part.ids

    def _begun(self, parts: list[Part], rule: Rule | None) -> _Step:
        """Where a step of these parts is under way: launched now, or ahead of its time."""
        follows = all(self._follows(part) for part in parts)
        if self._ahead and follows and self._desks[self._ahead.runner].holds(parts):
            return self._ahead
        if self._ahead:
            self.settle()
            follows = False
        if rule and self._build.block:
            parts = _cut(parts, rule)
        runner = self.decode_runner(sum(len(part.ids) for part in parts), len(parts))
        if rule and follows:
            self._desks[runner].follow(parts, rule)
        else:
            self._desks[runner].write(parts)
        runner.launch()
        return _Step(runner, 0)

    def _queued(self, step: _Step, parts: list[Part], rule: Rule, rows: int) -> _Step | None:
        """The step behind one that is under way; None where the host's rows stand in its io."""
        runner = self.decode_runner(rows, len(parts))
        desk, place = self._desks[runner], 0
        if runner is not step.runner:
            desk.follow(parts, rule)
        elif desk.repeats:
            place = 1 - step.place
            desk.decide(rule, place)
        else:
            return None
        runner.launch(place)
        return _Step(runner, place)

    def _run(self, runner: Runner, parts: list[Part]) -> list[Result]:
        self.settle()
        self._desks[runner].write(parts)
        runner.launch()
        return self._ended(_Step(runner, 0), parts)

    def _ended(self, step: _Step, parts: list[Part]) -> list[Result]:
        """Results of a step that is under way, none of a part of a prompt."""
        runner = step.runner
        runner.wait(step.place)
        self._last = runner
        results = self._results(runner, len(parts)) if "io.token" in runner.plan.buffers else []
        decoding = runner.plan.name == "decode"
        for part, result in zip(parts, results, strict=False):
            rows = 1 + result.accepted if decoding else len(part.ids)
            ids = [result.token, *result.drafts]
            self._next[part.slot] = _Next(part.start + rows, part.draw.step + 1, ids)
        if self._config.trace:
            rows = sum(1 + r.kept for r in results) if decoding else len(parts[0].ids)
            self._record(self._config.trace, runner.plan, parts, rows, results)
        return results

    def _results(self, runner: Runner, count: int) -> list[Result]:
        def read(name: str) -> list[Any]:
            has = f"io.{name}" in runner.plan.buffers
            return runner.read(f"io.{name}").tolist() if has else [()] * count

        accepted, token, drafts, confidence = map(
            read, ("accepted", "token", "drafts", "confidence")
        )
        kept = read("kept") if runner.plan.name == "decode" else [0] * count
        return [
            Result(accepted[s], token[s], tuple(drafts[s]), tuple(confidence[s]), kept[s])
            for s in range(count)
        ]

    def _record(
        self, file: Path, plan: Plan, parts: list[Part], rows: int, results: list[Result]
    ) -> None:
        line: dict[str, Any] = {
            "plan": plan.name,
            "rows": rows,
            "plan_rows": plan.rows,
            "sequences": len(parts),
            "start": parts[0].start,
            "ms": round(self.took_ms, 4),
        }
        if results:
            line["accepted"] = [result.accepted for result in results]
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _compile(self, plan: Plan) -> Runner:
        if "plan" in self._config.dump:
            name = f"{plan.name}-rows{plan.rows}-sequences{plan.sequences}-world{plan.world}.plan"
            (self._config.cache_dir / name).write_text(plan.text(), encoding="utf-8")
        runner = self._backend.compile(plan)
        write_constants(runner)
        self._desks[runner] = Desk(runner)
        return runner


def _cut(parts: Sequence[Part], rule: Rule) -> list[Part]:
    """The parts with the drafts that a step of them verifies."""
    rows = min(sum(len(part.ids) for part in parts), len(rule.price))
    confidence = np.array([part.confidence for part in parts], np.float32)
    kept = rule.kept(confidence, np.array([part.room for part in parts], np.int32), rows)
    return [p._replace(ids=p.ids[: 1 + n]) for p, n in zip(parts, kept.tolist(), strict=True)]
