"""The compiled plans of one engine, made when first needed: widths of decoding, chunks of prefill."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Backend, Runner
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.step_io import Part, write_constants, write_step


@dataclass(frozen=True, slots=True)
class Result:
    """What a step gave one sequence: drafts that stay, the token behind them, the next proposals."""

    accepted: int
    token: int
    drafts: tuple[int, ...]
    confidence: tuple[float, ...]  # of the drafts, before the sigmoid


class Plans:
    """Runs parts of sequences through the plan that fits them."""

    def __init__(self, build: Build, backend: Backend, config: RuntimeConfig) -> None:
        """Nothing is compiled yet."""
        self._build, self._backend, self._config = build, backend, config
        self._decode: dict[tuple[int, int], Runner] = {}
        self._prefill: dict[tuple[int, bool], Runner] = {}

    def decode(self, parts: list[Part]) -> list[Result]:
        """A decode step of all parts together."""
        return self._run(self.decode_runner(sum(len(p.ids) for p in parts), len(parts)), parts)

    def prefill(self, part: Part, ends: bool) -> Result | None:
        """A chunk of a prompt; a result only if the prompt ends with it."""
        rows = next(n for n in self._config.prefill_chunks if n >= len(part.ids))
        results = self._run(self.prefill_runner(rows, ends), [part])
        return results[0] if ends else None

    def decode_runner(self, rows: int, sequences: int) -> Runner:
        """The plan for this many rows and sequences."""
        key = rows, sequences
        if key not in self._decode:
            self._decode[key] = self._compile(build_decode(self._build, rows, sequences))
        return self._decode[key]

    def prefill_runner(self, rows: int, ends: bool) -> Runner:
        """The plan for a chunk of this many rows."""
        key = rows, ends
        if key not in self._prefill:
            self._prefill[key] = self._compile(build_prefill(self._build, rows, ends=ends))
        return self._prefill[key]

    def _run(self, runner: Runner, parts: list[Part]) -> list[Result]:
        write_step(runner, parts)
        runner.run()
        if "io.token" not in runner.plan.buffers:
            return []
        accepted, token = runner.read("io.accepted").tolist(), runner.read("io.token").tolist()
        if not self._build.block:
            return [Result(a, t, (), ()) for a, t in zip(accepted, token, strict=True)]
        drafts, confidence = runner.read("io.drafts").tolist(), runner.read("io.confidence").tolist()
        return [
            Result(a, t, tuple(d), tuple(c))
            for a, t, d, c in zip(accepted, token, drafts, confidence, strict=True)
        ]

    def _compile(self, plan: Plan) -> Runner:
        if "plan" in self._config.dump:
            name = f"{plan.name}-rows{plan.rows}-sequences{plan.sequences}-world{plan.world}.plan"
            (self._config.cache_dir / name).write_text(plan.text(), encoding="utf-8")
        runner = self._backend.compile(plan)
        write_constants(runner)
        return runner
