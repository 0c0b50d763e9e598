"""Print a step as data: every node with what it reads and writes, or what it all costs.

A plan is what both backends execute. Its text is stable, so two plans can be compared with diff;
its digest is part of the fingerprint that servers compare before they exchange caches. Nothing is
loaded but config.json: the full-size model works on any machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Cost, Life, Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.config import BUNDLED_CHECKPOINT, RuntimeConfig

_EXAMPLES = """\
A line of the text is: number, label (L = layer), outputs[shape]:type = Operation(inputs) constants.
Shapes, bytes and flops are those of one rank. Bytes count each weight, input and output of a node
once, and the part of persistent state that it touches when the context is full.

examples, each after python -m ultraflash.tools.show_plan:
  (nothing)                            one decoded token of the bundled tiny model
  --release --rows 6 --world 8 --summary
                                       what one of 8 GPUs moves to verify 5 drafts
  --release --rows 6 --sequences 3     rows of three conversations in one step
  CHECKPOINT --kind prefill --rows 16  a chunk of a prompt
  --world 2                            the same on two ranks: AllReduce, AllGather
"""
_DEFAULT_ROWS = {"decode": 1, "prefill": RuntimeConfig().prefill_chunks[-1]}


def build(options: argparse.Namespace) -> Plan:
    """The plan that the options ask for.

    Raises:
        GraphError: when the configuration, the world or the counts do not fit together.
    """
    for name in ("rows", "sequences", "max_sequences", "context"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise GraphError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    model = release_model() if options.release else Model.from_checkpoint(options.checkpoint)
    # One slot more than conversations, as in the engine: a prompt prefills while others decode.
    capacity = Capacity(options.max_sequences + 1, options.context or model.max_position)
    rows, sequences = options.rows or _DEFAULT_ROWS[options.kind], options.sequences
    if options.kind == "prefill":
        if sequences > 1:
            raise GraphError(f"a prefill chunk is of 1 sequence, got --sequences {sequences}")
        return build_prefill(Build(model, capacity, world=options.world), rows)
    if sequences > rows:
        raise GraphError(
            f"--sequences {sequences} is more than --rows {rows}: each sequence has a row at least"
        )
    return build_decode(Build(model, capacity, world=options.world), rows, sequences)


def summary(plan: Plan) -> Iterator[Table | str]:
    """What a plan costs: nodes by operation, buffers by lifetime, digest."""
    yield (
        f"{plan.name}, rows {plan.rows}, sequences {plan.sequences}, world {plan.world}; "
        f"of one rank: {len(plan.nodes):,} nodes, {len(plan.buffers):,} buffers"
    )
    yield _operations(plan)
    yield _buffers(plan)
    yield f"digest {plan.digest()}"


def _operations(plan: Plan) -> Table:
    count: dict[str, int] = {}
    cost: dict[str, Cost] = {}
    for node in plan.nodes:
        op = type(node.op).__name__
        count[op] = count.get(op, 0) + 1
        cost[op] = cost.get(op, Cost(0, 0)) + node.op.cost()
    total = plan.cost()
    table = _table("nodes by operation", "operation", ("nodes", "bytes", "%", "flops"))
    for op in sorted(cost, key=lambda name: (-cost[name].nbytes, name)):
        share = 100 * cost[op].nbytes / total.nbytes
        table.add_row(
            op, f"{count[op]:,}", f"{cost[op].nbytes:,}", f"{share:.1f}", f"{cost[op].flops:,}"
        )
    table.add_section()
    table.add_row("total", f"{len(plan.nodes):,}", f"{total.nbytes:,}", "", f"{total.flops:,}")
    return table


def _buffers(plan: Plan) -> Table:
    table = _table("buffers by lifetime", "lifetime", ("buffers", "bytes"))
    for life in Life:
        refs = plan.of_life(life)
        table.add_row(life.value, f"{len(refs):,}", f"{sum(ref.nbytes for ref in refs):,}")
    return table


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        plan = build(options)
    except (GraphError, OSError) as error:
        print(f"show_plan: {error}", file=sys.stderr)
        return 2
    try:
        if options.summary:
            console = Console(highlight=False)
            for part in summary(plan):
                console.print(part)
        else:
            sys.stdout.write(plan.text())
        sys.stdout.flush()
    except BrokenPipeError:  # a pager that has seen enough
        # Python flushes stdout once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.show_plan",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "checkpoint",
        nargs="?",
        type=Path,
        default=BUNDLED_CHECKPOINT,
        metavar="CHECKPOINT",
        help="folder with a config.json (default: the bundled tiny model)",
    )
    which.add_argument(
        "--release", action="store_true", help="the released model at full size, without files"
    )
    parser.add_argument(
        "--kind",
        choices=tuple(_DEFAULT_ROWS),
        default="decode",
        help="a decode step (default), or a chunk of a prompt",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="tokens in the step (default "
        + ", ".join(f"{rows} for {kind}" for kind, rows in _DEFAULT_ROWS.items())
        + ")",
    )
    parser.add_argument(
        "--sequences", type=int, default=1, metavar="N", help="whose tokens they are (default 1)"
    )
    parser.add_argument("--world", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a conversation at most (default: the model's limit)",
    )
    parser.add_argument(
        "--max-sequences",
        type=int,
        default=RuntimeConfig().max_sequences,
        metavar="N",
        help="conversations that decode at once (default %(default)s)",
    )
    parser.add_argument(
        "--summary", action="store_true", help="bytes and flops by operation instead of the text"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
