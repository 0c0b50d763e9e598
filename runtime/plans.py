"""The compiled plans of one engine, made when first needed: decode widths, prefill chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Backend, Runner
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.step_io import Desk, Part, write_constants


class Result(NamedTuple):
    """What a step gave one sequence: drafts that stay, the token behind them, the next ones."""

    accepted: int
    token: int
    drafts: tuple[int, ...]
    confidence: tuple[float, ...]  # of the drafts, before the sigmoid


class _Next(NamedTuple):
    """Where a slot's next step begins, as the device keeps it."""

    start: int
    step: int
    ids: list[int]


class _Ahead(NamedTuple):
    """A step that is under way before anybody asked for it."""

    runner: Runner
    place: int  # of its record


_NOTHING = _Next(-1, 0, [])


class Plans:
    """Runs parts of sequences through the plan that fits them."""

    def __init__(self, build: Build, backend: Backend, config: RuntimeConfig) -> None:
        """Nothing is compiled yet."""
        self._build, self._backend, self._config = build, backend, config
        self._runners: dict[tuple[str, int, int], Runner] = {}
        self._desks: dict[Runner, Desk] = {}
        self._next: dict[int, _Next] = {}  # by slot
        self._ahead: _Ahead | None = None

    def decode(self, parts: list[Part], ahead: bool = False) -> list[Result]:
        """A decode step of all parts together.

        `ahead`: unless a result ends it, the next step will be one of the same sequences with as
        many rows each and nothing else changed. Then it is queued behind this one before anybody
        waits: all it needs is on the device. There has to be room for its rows.

        Who asks for another step after all has lost some time, and what drafts of these sequences
        were drawn from. Their state is whole: what a step changes is addressed by position, so that
        its rows are like rejected ones, which rings have room for (`Capacity.ring`).
        """
        key = "decode", sum([len(p.ids) for p in parts]), len(parts)
        runner = self._runners.get(key) or self.decode_runner(*key[1:])
        return self._run(runner, parts, [self._follows(p) for p in parts], ahead)

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
            ("prefill", rows, ends), partial(build_prefill, self._build, rows, ends=ends)
        )

    def encode_runner(self, rows: int) -> Runner:
        """The plan for a chunk of this many rows through the encoder."""
        mode, tail = self._config.prefill, self._config.tail
        return self._runner(
            ("encode", rows, 1), partial(build_encode, self._build, mode, tail, rows)
        )

    def replay_runner(self) -> Runner:
        """The plan for the tail of an encoded prompt."""
        mode, tail = self._config.prefill, self._config.tail
        return self._runner(("replay", tail, 1), partial(build_replay, self._build, mode, tail))

    def _chunk(self, part: Part) -> int:
        return next(n for n in self._config.prefill_chunks if n >= len(part.ids))

    def _runner(self, key: tuple[str, int, int], build: Callable[[], Plan]) -> Runner:
        if key not in self._runners:
            self._runners[key] = self._compile(build())
        return self._runners[key]

    def _follows(self, part: Part) -> bool:
        """Whether a part is what the device expects of its slot."""
        start, step, ids = self._next.get(part.slot, _NOTHING)
        return start == part.start and step == part.draw.step and ids[: len(part.ids)] == part.ids

    def _run(
        self, runner: Runner, parts: list[Part], follows: Sequence[bool] = (False,),
        ahead: bool = False,
    ) -> list[Result]:  # fmt: skip
        started, desk, place = time.perf_counter(), self._desks[runner], 0
        if self._ahead and self._ahead.runner is runner and desk.holds(parts, follows):
            place = self._ahead.place
        else:
            if self._ahead:
                self.settle()
                follows = [False] * len(parts)
            desk.write(parts, follows)
            runner.launch()
        self._ahead = None
        if ahead and desk.repeats and runner.places > 1:
            self._ahead = _Ahead(runner, 1 - place)
            runner.launch(1 - place)
        runner.wait(place)
        if self._config.trace:
            self._record(self._config.trace, runner, parts, started)
        if "io.token" not in runner.plan.buffers:
            return []
        results = self._results(runner, len(parts))
        decoding = runner.plan.name == "decode"
        for part, result in zip(parts, results, strict=True):
            rows = 1 + result.accepted if decoding else len(part.ids)
            ids = [result.token, *result.drafts]
            self._next[part.slot] = _Next(part.start + rows, part.draw.step + 1, ids)
        return results

    def _results(self, runner: Runner, count: int) -> list[Result]:
        accepted, token = runner.read("io.accepted").tolist(), runner.read("io.token").tolist()
        if not self._build.block:
            return [Result(accepted[s], token[s], (), ()) for s in range(count)]
        drafts = runner.read("io.drafts").tolist()
        confidence = runner.read("io.confidence").tolist()
        return [
            Result(accepted[s], token[s], tuple(drafts[s]), tuple(confidence[s]))
            for s in range(count)
        ]

    def _record(self, file: Path, runner: Runner, parts: list[Part], started: float) -> None:
        plan, ms = runner.plan, (time.perf_counter() - started) * 1e3
        line: dict[str, Any] = {
            "plan": plan.name,
            "rows": sum(len(p.ids) for p in parts),
            "plan_rows": plan.rows,
            "sequences": len(parts),
            "start": parts[0].start,
            "ms": round(ms, 4),
        }
        if "io.accepted" in plan.buffers:
            line["accepted"] = runner.read("io.accepted").tolist()[: len(parts)]
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
