"""compute-sanitizer over one decode step of each width 1 to 8, greedy and sampled.

    python tests/gpu/sanitize.py [memcheck racecheck initcheck] [--widths 1,2,3]

A line a tool: clean, what was found, or why it could not run. Exit status 1 only for findings.
Kernels are launched one by one, so that a finding names its node.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
TOOLS = ("memcheck", "racecheck", "initcheck")
_FOUND = 42  # exit status that asks the tool for
_REFUSED = ("Device not supported", "Unable to find supported devices", "not supported on this")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")


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
    return max([_check(program, tool, options.widths, len(widths)) for tool in options.tools])


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])


def _check(program: str, tool: str, widths: str, count: int) -> int:
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND)]
    command += [sys.executable, str(HERE), "--steps", "--widths", widths]
    started = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False,
        env={**os.environ, "UF_EAGER": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    seconds, text = time.monotonic() - started, done.stdout + done.stderr
    steps = text.count("step of width")
    summaries = _SUMMARY.findall(text)
    summary = summaries[-1] if summaries else "no summary"
    if any(words in text for words in _REFUSED):
        print(f"{tool}: compute-sanitizer does not support this machine's GPU: nothing was checked")
        return 0
    if done.returncode == 0 and steps == count and " 0 " in f" {summary.split(':')[-1]}":
        print(f"{tool}: clean, {steps} widths in {seconds:.0f} s ({summary})")
        return 0
    print(f"{tool}: {steps} of {count} widths, exit status {done.returncode}, {summary}")
    told = [line for line in text.splitlines() if line.startswith("=========")]
    print("\n".join(told[:60] or text.splitlines()[-30:]))
    return 1


def run_steps(widths: list[int]) -> None:
    """One decode step of each width alone and greedy, then shared by sampled sequences."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    from run import name_the_rooms  # type: ignore[import-not-found]

    name_the_rooms()
    import numpy as np

    from helpers.device_rig import DeviceRig
    from ultraflash.runtime.step_io import Draw, Part

    rig, slots = DeviceRig(kept=False), (1, 2, 3)
    draws = [Draw(1.2, 0.9, 40, seed, 1, want_logprobs=True) for seed in slots]
    ids = [np.random.default_rng(s).integers(3, 480, 8 + s).tolist() for s in slots]
    told = [rig.prompt(s, i, d) for s, i, d in zip(slots, ids, draws, strict=True)]
    for width in widths:
        rows = [told[0].token, *told[0].drafts, *told[0].drafts][:width]
        rig.step([Part(1, len(ids[0]), rows, Draw(want_logprobs=True))])
        shares = [1 + (width - 1 - n) // 3 for n in range(min(width, 3))]
        parts = [
            Part(slots[n], len(ids[n]), [told[n].token, *told[n].drafts[: share - 1]], draws[n])
            for n, share in enumerate(shares)
        ]
        rig.step(parts)
        print(f"step of width {width} done")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
