"""Run a decode step on the interpreter and on a GPU, node by node, and name what differs first.

Each node gets the interpreter's inputs on both sides, so that a difference is that node's own. What
a node writes is filled with poison before, so that gaps show. Integers and codes must be equal;
floats may differ by rounding, measured against the size of the buffer's values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Node, Plan, Ref
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array, Runner
from ultraflash.runtime.backends import cuda_backend
from ultraflash.runtime.config import BUNDLED_CHECKPOINT, RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.errors import ConfigError, EngineError
from ultraflash.runtime.interpret import NumpyBackend
from ultraflash.runtime.plans import Plans
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights
from ultraflash.tools.gpu_arguments import check_drafts

_EXACT = ("i32", "u32", "i64", "u64", "u8")
# Relative to a buffer's rms: some ulps of bf16 at its largest values. Wrong terms are far above it.
_CLOSE = 2e-2
_EXAMPLES = """\
A line is: verdict, node number, label, buffer, how many elements are not equal, the largest error
in units of the buffer's rms. Equal buffers are only counted, unless --all is given.

examples, each after python -m ultraflash.tools.diff_plan:
  (nothing)                            four rows of the bundled tiny model
  CHECKPOINT --rows 6 --temperature 0.8
                                       verification and drawing, too
  CHECKPOINT --label L4.attn           only the nodes of one layer's attention
  CHECKPOINT --free                    the GPU goes on from its own values: differences add up
"""


class Twin(Runner, Protocol):
    """The other backend's runner: state and scratch can be forced upon it."""

    def write_state(self, ref: Ref, value: Array) -> None:
        """Replace a whole state buffer."""

    def poison(self, ref: Ref) -> None:
        """Fill a scratch buffer with bytes that no operation writes."""


@dataclass(frozen=True)
class Difference:
    """What two backends made of one buffer. `worst`: largest error in units of the rms."""

    number: int
    label: str
    ref: Ref
    unequal: int
    worst: float

    @property
    def verdict(self) -> str:
        """same, close (floats only), or DIFFERS."""
        if not self.unequal:
            return "same"
        return "close" if self.ref.dtype not in _EXACT and self.worst < _CLOSE else "DIFFERS"

    def __str__(self) -> str:
        size = int(np.prod(self.ref.shape))
        return (
            f"{self.verdict:8s}{self.number:5d} {self.label:28s} {self.ref!s:60s} "
            f"{self.unequal} of {size}, worst {self.worst:.2e}"
        )


def difference(number: int, label: str, ref: Ref, got: Array, want: Array) -> Difference:
    """Compare two arrays of one buffer; NaN equals NaN, and finite never equals infinite."""
    want = want.reshape(got.shape)
    if ref.dtype in _EXACT:
        return Difference(number, label, ref, int((got != want).sum()), 0.0)
    unequal = int((~((got == want) | (np.isnan(got) & np.isnan(want)))).sum())
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return Difference(number, label, ref, unequal, float("inf"))
    if not finite.any():
        return Difference(number, label, ref, unequal, 0.0 if not unequal else float("inf"))
    wide = want[finite].astype(np.float64)
    rms = float(np.sqrt(np.mean(wide**2))) or 1.0
    return Difference(
        number,
        label,
        ref,
        unequal,
        float(np.abs(got[finite].astype(np.float64) - wide).max()) / rms,
    )


def compare(
    plan: Plan, ours: Runner, theirs: Twin, label: str = "", *, free: bool = False
) -> Iterator[Difference]:
    """Run node by node; what every node under `label` wrote, compared.

    With `free` the other side starts with our state and io and then goes on from its own values.
    """
    if free:
        _force(plan.of_life(Life.STATE), ours, theirs)
    for number, node in enumerate(plan.nodes):
        wanted = f"{node.label}.".startswith(f"{label}.") or not label
        if wanted or free:
            if not free:
                _force(node.op.reads(), ours, theirs)
            for ref in _filled(node):
                _poison(theirs, ref)
            theirs.run(slice(number, number + 1))
        ours.run(slice(number, number + 1))
        if wanted:
            for ref in node.op.writes():
                yield difference(
                    number, node.label, ref, theirs.read(ref.name), ours.read(ref.name)
                )


def _force(refs: Sequence[Ref], ours: Runner, theirs: Twin) -> None:
    for ref in refs:
        if ref.life is Life.STATE:
            theirs.write_state(ref, ours.read(ref.name))
        elif ref.life is not Life.WEIGHT:
            theirs.write(ref.name, ours.read(ref.name))


def _filled(node: Node) -> list[Ref]:
    """Buffers that a node writes without having read them."""
    return [ref for ref in node.op.writes() if ref not in node.op.reads()]


def _poison(theirs: Twin, ref: Ref) -> None:
    if ref.life is Life.SCRATCH:
        theirs.poison(ref)
    elif ref.life is Life.IO:
        values = theirs.read(ref.name).copy()
        values.view(np.uint8)[...] = 0xFF
        theirs.write(ref.name, values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when nothing differs, 1 when something does, 2 when nothing could be run."""
    options = _parser().parse_args(arguments)
    try:
        differences = list(_run(options))
    except (EngineError, GraphError, OSError) as error:
        print(f"diff_plan: {error}", file=sys.stderr)
        return 2
    bad = [d for d in differences if d.verdict == "DIFFERS"]
    for found in differences:
        if options.all or found.verdict != "same":
            print(found)
    same = sum(d.verdict == "same" for d in differences)
    first = f", first {bad[0].label} in {bad[0].ref.name}" if bad else ""
    print(f"{len(differences)} buffers: {same} equal to the bit, {len(bad)} differ{first}")
    return 1 if bad else 0


def _run(options: argparse.Namespace) -> Iterator[Difference]:
    config = replace(
        RuntimeConfig.from_env(checkpoint=options.checkpoint, draft_block=options.block),
        eager=False,
        check=False,
    )
    if options.rows < 1 or options.length < 1:
        raise ConfigError(
            f"--rows and --length must be at least 1, got {options.rows} and {options.length}"
        )
    model, index = Model.from_checkpoint(config.checkpoint), CheckpointIndex.open(config.checkpoint)
    tokens = options.length + options.rows
    if tokens > model.max_position:
        raise ConfigError(
            f"--length {options.length} and --rows {options.rows} are {tokens} tokens, this model "
            f"has {model.max_position} positions: take fewer"
        )
    check_drafts(options.rows, config.block(model), options.temperature)
    backend_class = cuda_backend()
    prepare_cache_dir(config)
    cuda = backend_class.open(config, index, model, keep_scratch=True)
    numpy = NumpyBackend(load_weights(index, model, 1, cache_dir=config.cache_dir))
    max_seq = min(model.max_position, max(1024, tokens))
    build = Build(model, Capacity(3, max_seq), block=config.block(model))
    rng = np.random.default_rng(0)
    ids = rng.integers(3, model.vocab, tokens).tolist()
    chunk = config.prefill_chunks[-1]
    _fill(Plans(build, numpy, config), Part(1, 0, ids[: options.length]), chunk)
    plan = build_decode(build, options.rows, 1)
    ours, theirs = numpy.compile(plan), cuda.compile(plan)
    top_p, top_k = (0.9, 40) if options.temperature else (1.0, 0)
    draw = Draw(options.temperature, top_p, top_k, seed=7, step=3, want_logprobs=True)
    for runner in (ours, theirs):
        _write(runner, Part(1, options.length, ids[options.length :], draw))
    yield from compare(plan, ours, theirs, options.label, free=options.free)


def _fill(plans: Plans, prompt: Part, chunk: int) -> None:
    """Run a prompt as the engine does, in chunks: a ring has no room for all of a long one."""
    at, end = 0, len(prompt.ids)
    while at < end:
        part = prompt._replace(start=at, ids=prompt.ids[at : at + chunk])
        at += len(part.ids)
        plans.prefill(part, ends=at == end)


def _write(runner: Runner, part: Part) -> None:
    write_constants(runner)
    write_step(runner, [part])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.diff_plan",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        default=BUNDLED_CHECKPOINT,
        metavar="CHECKPOINT",
        help="folder of the checkpoint (default: the bundled tiny model)",
    )
    parser.add_argument(
        "--rows", type=int, default=4, metavar="N", help="tokens in the step (default: %(default)s)"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=37,
        metavar="N",
        help="tokens before the compared step (default: %(default)s)",
    )
    parser.add_argument(
        "--block", type=int, metavar="B", help="rows of a draft block, 0 = none (default: trained)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy"
    )
    parser.add_argument(
        "--label", default="", metavar="L", help="compare only nodes of this label, such as L0.attn"
    )
    parser.add_argument("--free", action="store_true", help="do not force inputs upon the GPU")
    parser.add_argument("--all", action="store_true", help="print equal buffers too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
