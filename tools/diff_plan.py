"""Both backends over one plan: which node, which buffer differs first, and by how much.

    python -m ultraflash.tools.diff_plan CHECKPOINT [--rows N] [--length N] [--block B] [--free]

Each node gets the interpreter's inputs on both sides, so that a difference is that node's own; with
`--free` the GPU runs freely and differences add up. Integers and codes must be equal; sums are
compared with the scale of their terms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan
from ultraflash.graphs.step import Build
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.gpu.backend import CudaBackend, CudaRunner
from ultraflash.runtime.gpu.driver import Device, allocate, upload
from ultraflash.runtime.interpret import NumpyBackend, NumpyRunner
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step
from ultraflash.runtime.weights.device import upload_weights
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights

_EXACT = ("i32", "u32", "i64", "u64", "u8")


def open_both(folder: Path) -> tuple[Model, NumpyBackend, CudaBackend]:
    """A checkpoint on both backends."""
    model, index = Model.from_checkpoint(folder), CheckpointIndex.open(folder)
    device = Device.open()

    def place(name: str, array: np.ndarray) -> int:
        address = allocate(array.nbytes, f"weight {name}")
        upload(address, array)
        return address

    cache = prepare_cache_dir(RuntimeConfig.from_env())
    cuda = CudaBackend(device, upload_weights(index, model, place), cache, keep_scratch=True)
    return model, NumpyBackend(load_weights(index, model, 1)), cuda


def run_part(runner: NumpyRunner | CudaRunner, parts: list[Part]) -> None:
    """One step."""
    write_constants(runner)
    write_step(runner, parts)


def compare_nodes(plan: Plan, ours: NumpyRunner, theirs: CudaRunner) -> list[str]:
    """Run node by node, the GPU from the interpreter's values; a line for each buffer."""
    lines = []
    for number, node in enumerate(plan.nodes):
        for ref in node.op.reads():
            if ref.life is Life.SCRATCH:
                theirs.write(ref.name, ours.read(ref.name))
            elif ref.life is Life.STATE:
                theirs.write_state(ref, ours.read(ref.name))
            elif ref.life is Life.IO:
                theirs.write(ref.name, ours.read(ref.name))
        for ref in node.op.writes():
            if ref.life is Life.SCRATCH:
                theirs.poison(ref)
        ours.run(slice(number, number + 1))
        theirs.run(slice(number, number + 1))
        for ref in node.op.writes():
            got, want = theirs.read(ref.name), ours.read(ref.name)
            lines.append(_line(number, node.label, str(ref), ref.dtype in _EXACT, got, want))
    return lines


def _line(number: int, label: str, ref: str, exact: bool, got: np.ndarray, want: np.ndarray) -> str:
    want = want.reshape(got.shape)
    differ = (
        int((got != want).sum())
        if exact
        else int((~np.isclose(got, want, 0, 0, equal_nan=True)).sum())
    )
    finite = np.isfinite(want)
    error = 0.0
    if not exact and finite.any():
        scale = np.sqrt(np.mean(want[finite].astype(np.float64) ** 2)) or 1.0
        error = float(np.abs(got[finite].astype(np.float64) - want[finite]).max() / scale)
        if not np.array_equal(np.isfinite(got), finite):
            error = np.inf
    bad = differ > 0 if exact else not error < 2e-2
    word = "DIFFERS" if bad else "same" if differ == 0 else "close"
    return f"{word:8s}{number:5d} {label:28s} {ref:60s} {differ} of {got.size}, worst {error:.2e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit status 1 when a node differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=37, help="tokens before the compared step")
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--all", action="store_true", help="print equal buffers too")
    options = parser.parse_args(arguments)
    model, numpy, cuda = open_both(options.checkpoint)
    build = Build(model, Capacity(3, 1024), block=options.block, round_attention=False)
    rng = np.random.default_rng(0)
    ids = [int(i) for i in rng.integers(3, model.vocab, options.length + options.rows)]
    warm = numpy.compile(build_decode(build, options.length, 1))
    run_part(warm, [Part(1, 0, ids[: options.length])])
    warm.run()
    plan = build_decode(build, options.rows, 1)
    ours, theirs = numpy.compile(plan), cuda.compile(plan)
    draw = Draw(
        options.temperature, 0.9 if options.temperature else 1.0, 40, 7, 3, want_logprobs=True
    )
    part = Part(1, options.length, ids[options.length :], draw)
    run_part(ours, [part])
    run_part(theirs, [part])
    lines = compare_nodes(plan, ours, theirs)
    bad = [line for line in lines if line.startswith("DIFFERS")]
    for line in lines if options.all else [l for l in lines if not l.startswith("same")]:
        print(line)
    print(
        f"{len(lines)} buffers: {len(bad)} differ, {sum(l.startswith('same') for l in lines)} equal to the bit"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
