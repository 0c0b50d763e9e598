"""compute-sanitizer over one decode step of each width 1 to 8, on the tiny model.

    python tests/gpu/sanitize.py [memcheck racecheck initcheck] [--widths 1,2,3]

A line a tool and width: clean, or what was found; or why a tool could not run. Exit status 1 only
for findings and steps that did not end. Kernels are launched one by one, so that a finding names
its kernel. The tools run side by side, each in one process for all widths: taking kernels apart
costs more than running them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve()
TOOLS = ("memcheck", "racecheck", "initcheck")
_REFUSED = ("Device not supported", "Unable to find supported devices", "not supported on this")
_STEP = re.compile(r"step of width (\d+) took ([\d.]+) s")
_SAID = re.compile(r"========= *(\S.*)")
_NO_FINDING = re.compile(r"COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY: 0 ")
_SHOWN = 40  # lines of a finding
_SLOW_S = 2.0  # a node that takes longer is told


@dataclass
class Found:
    """What a tool said during the step of one width."""

    width: int
    seconds: float
    lines: list[str] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Run the tools, or with `--steps` be what they look at."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tools", nargs="*", default=list(TOOLS))
    parser.add_argument("--widths", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--steps", action="store_true", help="only the steps, without a tool")
    options = parser.parse_args(arguments)
    widths = [int(text) for text in options.widths.split(",")]
    if options.steps:
        run_steps(widths)
        return 0
    program = shutil.which("compute-sanitizer", path=_search_path())
    if program is None:
        print("compute-sanitizer is not on this machine: nothing was checked")
        return 0
    with ThreadPoolExecutor(len(options.tools)) as pool:
        return max(pool.map(lambda tool: _check(program, tool, widths), options.tools))


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])


def _check(program: str, tool: str, widths: list[int]) -> int:
    command = [program, "--tool", tool, "--show-backtrace", "device"]
    command += [sys.executable, str(HERE), "--steps", "--widths", ",".join(map(str, widths))]
    started = time.monotonic()
    text, status = _heard(tool, command)
    if any(words in text for words in _REFUSED):
        print(f"{tool}: compute-sanitizer does not support this machine's GPU: nothing was checked")
        return 0
    found, rest = sort_out(text)
    print("\n".join(report(tool, found, rest)))
    missing = sorted(set(widths) - {each.width for each in found})
    seconds = time.monotonic() - started
    if missing or status:
        without = ", ".join(map(str, missing)) or "(none)"
        print(f"{tool}: no step of width {without}, exit status {status}, {seconds:.0f} s")
        print("\n".join(text.splitlines()[-_SHOWN:]))
        return 1
    print(f"{tool}: {seconds:.0f} s in all")
    return int(bool(rest) or any(each.lines for each in found))


def _heard(tool: str, command: list[str]) -> tuple[str, int]:
    """What the tool prints, and its exit status. Steps are passed on as they end, so that a run
    that is broken off has told them.
    """
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, "UF_EAGER": "1", "PYTHONUNBUFFERED": "1"},
    ) as running:  # fmt: skip
        assert running.stdout
        for line in running.stdout:
            lines.append(line)
            if " took " in line:  # a step, or a slow node
                print(f"{tool}: {line.rstrip()}", flush=True)
    return "".join(lines), running.returncode


def sort_out(text: str) -> tuple[list[Found], list[str]]:
    """The tool's findings by the step in which they came, and those behind the last one.

    What stands before the first step counts as the first step's.
    """
    found: list[Found] = []
    lines: list[str] = []
    for line in text.splitlines():
        if step := _STEP.search(line):
            found.append(Found(int(step[1]), float(step[2]), lines))
            lines = []
        elif (said := _SAID.match(line)) and not _NO_FINDING.search(line):
            lines.append(said[1])
    return found, lines


def report(tool: str, found: list[Found], rest: list[str]) -> Iterator[str]:
    """A line a width, and findings under it."""
    for each in found:
        yield f"{tool} width {each.width}: {'found' if each.lines else 'clean'}, {each.seconds} s"
        yield from (f"    {line}" for line in each.lines[:_SHOWN])
    yield from (f"{tool} at the end: {line}" for line in rest[:_SHOWN])


def run_steps(widths: list[int]) -> None:
    """A decode step of each width: odd ones alone and greedy, even ones shared and sampled."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    from run import name_the_rooms  # type: ignore[import-not-found]

    name_the_rooms()
    import numpy as np

    from helpers.device_rig import DeviceRig, Outcome
    from ultraflash.runtime.step_io import Draw, Part, write_step

    def node_by_node(parts: list[Part]) -> list[Outcome]:
        runner = rig.runner("decode", sum(len(part.ids) for part in parts), len(parts))
        write_step(runner, parts)
        for number, node in enumerate(runner.plan.nodes):
            started = time.perf_counter()
            runner.run(slice(number, number + 1))
            seconds = time.perf_counter() - started
            if seconds > _SLOW_S:
                print(f"    {node.label} ({node.op.stem()}) took {seconds:.1f} s")
        return rig.outcomes(runner, parts)

    began = time.perf_counter()
    rig, slots = DeviceRig(kept=False), (1, 2, 3)
    draws = [Draw(1.2, 0.9, 40, seed, 1, want_logprobs=True) for seed in slots]
    ids = [np.random.default_rng(s).integers(3, 480, 2).tolist() for s in slots]
    # One step in place of prompts: a chunk of 16 rows each would take a tool most of its time.
    told = node_by_node([Part(s, 0, i, d) for s, i, d in zip(slots, ids, draws, strict=True)])
    print(f"what comes first took {time.perf_counter() - began:.1f} s")
    for width in widths:
        began = time.perf_counter()
        if width % 2:
            rows = [told[0].token, *told[0].drafts][:width]
            parts = [Part(1, len(ids[0]), rows, Draw(want_logprobs=True))]
        else:
            shares = [1 + (width - 1 - n) // 3 for n in range(min(width, 3))]
            parts = [
                Part(slots[n], len(ids[n]), [told[n].token, *told[n].drafts[: share - 1]], draws[n])
                for n, share in enumerate(shares)
            ]
        node_by_node(parts)
        print(f"step of width {width} took {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
