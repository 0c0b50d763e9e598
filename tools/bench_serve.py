"""`make bench`: what a user of the server feels, measured through HTTP.

Seconds until ready, memory of all its processes, time to the first token, decoding speed: plain
(no drafting, no store), then as the server comes, with tokens and rows of a step. One request at a
time, greedy, a fixed prompt and length, so that two rows of the CSV compare.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ultraflash.tools.chat_client import ChatError, Meter, chat_body, model_name, stream_chat
from ultraflash.tools.local_server import LocalServer, ServerError
from ultraflash.tools.speed_table import FOLDER, append, commit, today

_PROMPT = "implement the tetris game. output HTML code directly - no explanation."
_CSV = FOLDER / "cpu.csv"


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the CSV. Speeds and times are medians over `runs`."""

    date: str
    commit: str
    machine: str
    cores: int
    load: float  # of other work, before the measurement
    python: str
    numpy: str
    checkpoint: str
    runs: int
    prompt_tokens: int
    tokens: int
    ready_s: float
    memory_mib: float
    first_token_ms: float
    tokens_per_s: float  # plain decoding, one token a step
    drafted_tokens_per_s: float
    accepted_per_step: float  # tokens that a step emits
    rows_per_step: float
    warm_first_token_ms: float  # of the same prompt again, its prefix from the store


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 after a measurement, 1 with one sentence on stderr."""
    options = _parser().parse_args(argv)
    busy, cores = _load(), _cores()
    if busy > cores / 4:
        print(
            f"bench: other work keeps this machine busy (load {busy:.1f} on {cores} cores): "
            "expect worse figures than its own",
            file=sys.stderr,
        )
    try:
        result = measure(options.checkpoint, options.tokens, options.runs, options.timeout)
    except (ServerError, ChatError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    Console().print(_table(result))
    if options.csv:
        append(options.csv, result)
        print(f"row appended to {options.csv}")
    return 0


def measure(checkpoint: str | None, tokens: int, runs: int, timeout: float) -> Result:
    """Start two servers in turn, ask each `runs` + 1 times (the first answer only warms up).

    Raises:
        ServerError: when the server does not become ready.
        ChatError: when it refuses or breaks off an answer.
    """
    load = _load()
    plain = _series(
        checkpoint, tokens, runs, timeout, {"UF_DRAFT_BLOCK": "0", "UF_STORE_BYTES": "0"}
    )
    drafted = _series(checkpoint, tokens, runs, timeout, {})
    return Result(
        date=today(),
        commit=commit(),
        machine=_machine(),
        cores=_cores(),
        load=load,
        python=platform.python_version(),
        numpy=np.__version__,
        checkpoint=Path(checkpoint).name if checkpoint else "bundled",
        runs=runs,
        prompt_tokens=plain.meters[0].prompt_tokens,
        tokens=plain.meters[0].tokens,
        ready_s=round(drafted.ready_s, 2),
        memory_mib=round(drafted.memory / 2**20, 1),
        first_token_ms=plain.median("first_token_ms"),
        tokens_per_s=plain.median("tokens_per_s"),
        drafted_tokens_per_s=drafted.median("tokens_per_s"),
        accepted_per_step=drafted.logged("average_accept_length"),
        rows_per_step=drafted.logged("average_rows"),
        warm_first_token_ms=drafted.median("first_token_ms"),
    )


@dataclass(frozen=True)
class _Series:
    """The timed answers of one server, and what its log said of them."""

    ready_s: float
    memory: int
    meters: list[Meter]
    log: list[str]

    def median(self, name: str) -> float:
        middle: float = statistics.median(getattr(m, name) for m in self.meters)
        return round(middle, 1)

    def logged(self, field: str) -> float:
        """Median of a field of the `request_end` lines; the first answer only warmed up."""
        found = [re.search(rf"\b{field}=([\d.]+)", line) for line in self.log[1:]]
        return round(statistics.median(float(m.group(1)) for m in found if m), 2)


def _series(
    checkpoint: str | None, tokens: int, runs: int, timeout: float, switches: Mapping[str, str]
) -> _Series:
    arguments = ["--checkpoint", checkpoint] if checkpoint else []
    with LocalServer(*arguments, switches=switches) as server:
        ready_s = server.wait_ready(timeout)
        name = model_name(server.url)
        body = chat_body(_PROMPT, tokens, model=name, temperature=0, ignore_eos=True)
        memory, meters = 0, []
        for _ in range(runs + 1):
            meter = Meter()
            for chunk in stream_chat(server.url, body):
                meter.feed(chunk)
            meters.append(meter)
            memory = max(memory, server.memory_bytes())
        text = server.log.read_text(errors="replace")
    log = [line for line in text.splitlines() if "request_end" in line]
    return _Series(ready_s, memory, meters[1:], log)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.bench_serve",
        description="Measure the server through HTTP: one request at a time, greedy.",
    )
    parser.add_argument("--checkpoint", help="checkpoint folder (default: the bundled tiny one)")
    parser.add_argument("--tokens", type=_count, default=200, metavar="N", help="default: 200")
    parser.add_argument("--runs", type=_count, default=3, metavar="N", help="default: 3")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument(
        "--csv",
        nargs="?",
        type=Path,
        const=_CSV,
        metavar="FILE",
        help="append a row (default file: tools/speed/cpu.csv)",
    )
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def _table(result: Result) -> Table:
    table = Table(
        title=f"{result.machine}, {result.cores} cores, load {result.load}, commit {result.commit}"
    )
    table.add_column("measured through HTTP")
    table.add_column("value", justify="right")
    table.add_row("ready after", f"{result.ready_s:.1f} s")
    table.add_row("memory, all processes (PSS)", f"{result.memory_mib:.0f} MiB")
    table.add_row(
        f"first token, {result.prompt_tokens}-token prompt", f"{result.first_token_ms:.0f} ms"
    )
    table.add_row("the same again, from the store", f"{result.warm_first_token_ms:.0f} ms")
    table.add_row(
        f"plain decoding, {result.tokens} tokens, median of {result.runs}",
        f"{result.tokens_per_s:.1f} tokens/s",
    )
    table.add_row("with drafting", f"{result.drafted_tokens_per_s:.1f} tokens/s")
    table.add_row(
        "tokens and rows of a step",
        f"{result.accepted_per_step:.2f} of {result.rows_per_step:.2f}",
    )
    return table


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _machine() -> str:
    """The processor's name as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    sys.exit(main())
