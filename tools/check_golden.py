"""Compare the engine with golden data that the model authors' own code computed.

    python -m ultraflash.tools.check_golden DIR [--backend numpy|cuda] [--world N] [--only TEXT]

One line an item: name, error, limit, PASS, FAIL or SKIP with its reason; then a summary. Exit
status: 0 nothing failed, 1 something failed, 2 the comparison could not be made.
tests/golden/README.md describes the folder and the three nets.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ultraflash.graphs.errors import GraphError
from ultraflash.runtime.errors import EngineError
from ultraflash.runtime.probe import Probe
from ultraflash.tools.golden import draft, exact, free, later, layers, text
from ultraflash.tools.golden.data import Golden, GoldenError
from ultraflash.tools.golden.limits import BY_ATTENTION, limits_for
from ultraflash.tools.golden.probe import GoldenProbe
from ultraflash.tools.golden.report import Report
from ultraflash.tools.golden.run import Run, Section, run_section

_VISION = "vision is not built yet"
_FORCED = ("begin", "advance", "forced_layer", "forced_head", "caches")

SECTIONS = (
    # 1. Bit for bit, or nearly so.
    Section("quant", "quant", ("quant",), exact.check_quant),
    Section("rope", "rope", ("rope", "rope_table"), exact.check_rope),
    Section(
        "engram_hash",
        "engram_hash",
        ("hash_rows", "engram_constants", "token_map"),
        exact.check_engram_hash,
    ),
    Section("sinkhorn", "sinkhorn", ("sinkhorn", "layer_mix"), exact.check_sinkhorn),
    Section("gate", "gate", ("gate",), exact.check_gate),
    Section("tokenizer", "chat.json", ("tokenize",), text.check_tokenizer),
    Section("chat", "chat.json", (), text.check_chat),
    # 2. Layer by layer from the golden stream: this is where mistakes show.
    Section("layers", "prompts", _FORCED, layers.check_layers),
    # 3. Running freely.
    Section("logits", "logits", ("prefill", "extend"), free.check_logits),
    Section("greedy", "greedy", ("prefill", "extend"), free.check_greedy),
    Section("prompts", "logits", ("prompt", "prefill", "caches"), free.check_prompts),
    Section("decisions", "decisions", ("trace",), free.check_decisions),
    Section("caches", "prompts", ("prefill", "caches"), free.check_caches),
    Section("resize_plans", "resize_plans.json", items=later.resize_items, reason=_VISION),
    Section("vision", "vision", items=later.vision_items, reason=_VISION),
    Section("dspark", "dspark", ("taps", "draft"), draft.check_draft),
)


def compare(
    golden: Golden,
    probe: GoldenProbe,
    report: Report,
    attention: str = "bf16",
    world: int = 1,
) -> int:
    """Run every section; the number of items that failed."""
    run = Run(golden, probe, limits_for(attention, world), report)
    for section in SECTIONS:
        run_section(run, section)
    return report.count("FAIL")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    report = Report(print, options.only)
    try:
        golden = Golden.open(options.folder)
        max_seq = golden.longest()
        probe = Probe.open(
            golden.checkpoint,
            backend=options.backend,
            world=options.world,
            max_seq=max_seq,
            attention_weights=options.attention,
        )
        failed = compare(golden, probe, report, options.attention, options.world)
    except (GoldenError, GraphError, EngineError) as error:
        print(f"check_golden: {error}", file=sys.stderr)
        return 2
    if not report.items:
        print(f"check_golden: no item's name contains {options.only!r}", file=sys.stderr)
        return 2
    print(report.summary(time.monotonic() - started))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_golden", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="holds ckpt/ and expected/")
    parser.add_argument("--backend", default="numpy", choices=("numpy", "cuda"))
    parser.add_argument("--world", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="items whose name contains TEXT")
    parser.add_argument(
        "--attention",
        default="bf16",
        choices=tuple(BY_ATTENTION),
        help="rounding of attention weights: bf16 as the reference does, with tight limits "
        "(default), or fp32 as the engine serves, with wide ones",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
