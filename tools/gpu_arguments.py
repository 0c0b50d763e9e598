"""What tools around kernels and graphs share: their model, widths, GPUs, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ultraflash.graphs.capacity import MAX_ROWS, Capacity
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.ptx import ARCHITECTURES
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.errors import ConfigError, EngineError


def tool_parser(name: str, description: str | None, examples: str) -> argparse.ArgumentParser:
    """A tool's parser; the texts keep their lines."""
    return argparse.ArgumentParser(
        prog=f"python -m ultraflash.tools.{name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_tool(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> int:
    """Exit status: 0 after the work, 1 with what was wrong on stderr."""
    options = parser.parse_args(arguments)
    try:
        work(options)
    except (EngineError, GraphError, OSError) as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 1
    return 0


def add_checkpoint(parser: argparse.ArgumentParser, *, release: bool) -> None:
    """`--checkpoint`, and `--release` where files are not needed."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder with a checkpoint (default: the bundled tiny model)",
    )
    if release:
        which.add_argument(
            "--release", action="store_true", help="the released model at full size, without files"
        )
    parser.add_argument(
        "--block", type=int, metavar="B", help="rows of a draft block, 0 = none (default: trained)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that a slot holds (default: the checkpoint's limit)",
    )


def add_csv(parser: argparse.ArgumentParser, what: str = "") -> None:
    """`--csv [FILE]`: True without a file, for the GPU's table of `what` (speed_table.csv_file)."""
    name = f"<gpu>_{what}" if what else "<gpu>"
    parser.add_argument(
        "--csv",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help=f"append rows (default file: tools/speed/{name}.csv)",
    )


def add_rows(
    parser: argparse.ArgumentParser, default: str, most: int = MAX_ROWS, wider: str = ""
) -> None:
    """`--rows`, each at most `most`; `wider` says what more rows than a decode step's are."""
    parser.add_argument(
        "--rows",
        type=partial(counts, most=most),
        default=counts(default),
        metavar="N..M",
        help=f"tokens that a decode step verifies: 4, or 1,2,4, or 1..8{wider} "
        f"(default: {default})",
    )


def counts(text: str, most: int = MAX_ROWS) -> tuple[int, ...]:
    """The numbers of "4", "1,2,4" or "1..8".

    Raises:
        argparse.ArgumentTypeError: naming the text, when it is nothing of that.
    """
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not like 4, or 1,2,4, or 1..8")
        found += range(int(first), int(last if dots else first) + 1)
    if not found or min(found) < 1 or max(found) > most:
        raise argparse.ArgumentTypeError(f"{text!r} must lie between 1 and {most}")
    return tuple(dict.fromkeys(found))


def architectures(text: str) -> tuple[str, ...]:
    """The architectures of "sm_90a,sm_100a".

    Raises:
        argparse.ArgumentTypeError: when there are no kernels for one of them.
    """
    found = tuple(dict.fromkeys(text.split(",")))
    if unknown := [arch for arch in found if arch not in ARCHITECTURES]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is unknown, kernels exist for {', '.join(ARCHITECTURES)}"
        )
    return found


def check_drafts(rows: int, block: int, temperature: float) -> None:
    """Refuse a step that verifies drafts that no block has: what they were drawn from is not there.

    Raises:
        ConfigError: naming rows, block and the remedy.
    """
    if temperature and rows > block + 1:
        raise ConfigError(
            f"{rows} rows of one conversation verify {rows - 1} drafts and a block has {block}: "
            f"use --block {rows - 1}, fewer --rows, or --temperature 0, which compares ids alone"
        )


def settings(options: argparse.Namespace) -> RuntimeConfig:
    """The engine's settings: switches of the environment, then these arguments.

    Raises:
        ConfigError: for a malformed switch.
    """
    return RuntimeConfig.from_env(
        checkpoint=options.checkpoint, draft_block=options.block, max_seq=options.context
    )


def chosen_build(options: argparse.Namespace, config: RuntimeConfig, world: int = 1) -> Build:
    """What all plans of a server with these settings have in common, as the engine makes it.

    Raises:
        ConfigError: when the checkpoint does not allow it.
        GraphError: when its config.json is missing or incomplete.
    """
    release = getattr(options, "release", False)
    model = release_model() if release else Model.from_checkpoint(config.checkpoint)
    max_seq = config.max_seq or model.max_position
    if max_seq > model.max_position:
        raise ConfigError(f"--context {max_seq} is more than the model's {model.max_position}")
    rounded = config.attention_weights == "bf16"
    capacity = Capacity(config.max_sequences + 1, max_seq)
    return Build(model, capacity, world, config.block(model), rounded)
