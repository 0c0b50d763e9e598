"""Draw the speed tables: step against rows and against context beside the time that reading alone
takes, and prompt tokens a second. Figures come from tools/speed/*.csv and from nowhere else; of
rows that differ in date and commit alone, the last one counts.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from ultraflash.tools.speed_table import FOLDER, ROOT
from ultraflash.tools.svg_chart import Axis, Series, chart, even_marks

_EMULATED = "shard step, emulated: one GPU as one rank, exchanges loop back, synthetic weights"
_MODEL, _ROWS, _CONTEXT = "released model", 7, 8192
Table = dict[tuple[str, ...], dict[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with one sentence on stderr when there is nothing to draw."""
    options = _parser().parse_args(arguments)
    try:
        for path, text in drawings(options.speed, options.gpu).items():
            (options.docs / path).write_text(text, encoding="utf-8")
            print(options.docs / path)
    except FileNotFoundError as error:
        tool = "bench_prefill" if "prefill" in str(error.filename) else "bench_decode"
        print(
            f"bench_plot: there is no table {error.filename}: measure one on a GPU, "
            f"python -m ultraflash.tools.{tool} --csv",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"bench_plot: {error}", file=sys.stderr)
        return 1
    return 0


def drawings(speed: Path, gpu: str) -> dict[str, str]:
    """SVG texts by file name.

    Raises:
        ValueError: when the tables have no rows of the released model.
        OSError: when a table is missing.
    """
    keys = ("world", "rows", "context", "routing")
    decode = _latest(speed / f"{gpu}_decode.csv", keys)
    prefill = _latest(
        speed / f"{gpu}_prefill.csv", ("world", "chunk", "context", "prefill", "plan")
    )
    return {
        f"{gpu}_step_by_rows.svg": _by_rows(gpu, decode),
        f"{gpu}_step_by_context.svg": _by_context(gpu, decode),
        f"{gpu}_prefill.svg": _prefill(gpu, prefill),
    }


def _latest(path: Path, keys: Sequence[str]) -> Table:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == _MODEL]
    if not rows:
        raise ValueError(f"{path} has no rows of the {_MODEL}: run the benchmarks with --csv")
    return {tuple(row[key] for key in keys): row for row in rows}


def _steps(rows: Sequence[dict[str, str]], of: str, along: str) -> list[Series]:
    """Measured and read-only milliseconds for each value of `of`, along `along`."""
    series = []
    for colour, value in enumerate(sorted({row[of] for row in rows}, key=int)):
        mine = sorted((row for row in rows if row[of] == value), key=lambda row: int(row[along]))
        floor = [float(r["read_gb"]) / float(r["read_tb_per_s"]) for r in mine]
        x = [float(r[along]) for r in mine]
        step = [float(r["step_p50_ms"]) for r in mine]
        series.append(Series(f"world {value}", list(zip(x, step, strict=True)), colour))
        series.append(
            Series(f"world {value}, reading", list(zip(x, floor, strict=True)), colour, dashed=True)
        )
    return series


def _by_rows(gpu: str, table: Table) -> str:
    rows = [r for r in table.values() if r["routing"] == "random" and int(r["context"]) == _CONTEXT]
    series = _steps(rows, "world", "rows")
    x = Axis("rows of a step", [(n, str(n)) for n in range(9)])
    return chart(
        f"{gpu.upper()}: decode step behind {_CONTEXT:,} tokens", x, _ms(series), series, _EMULATED
    )


def _by_context(gpu: str, table: Table) -> str:
    rows = [r for r in table.values() if r["routing"] == "random" and int(r["rows"]) == _ROWS]
    series = _steps(rows, "world", "context")
    title = f"{gpu.upper()}: decode step of {_ROWS} rows"
    return chart(title, _tokens("context, tokens"), _ms(series), series, _EMULATED)


def _prefill(gpu: str, table: Table) -> str:
    rows = [r for r in table.values() if r["prefill"] == "full" and r["plan"] == "part"]
    series = []
    kinds = sorted({(int(r["world"]), int(r["context"])) for r in rows})
    for colour, (world, context) in enumerate(kinds):
        mine = [r for r in rows if (int(r["world"]), int(r["context"])) == (world, context)]
        mine.sort(key=lambda r: int(r["chunk"]))
        points = [(float(r["chunk"]), float(r["tokens_per_s"])) for r in mine]
        series.append(Series(f"world {world}, at {_short(context)}", points, colour))
    top = max((y for one in series for _, y in one.points), default=1.0)
    x = Axis("rows of a chunk", [(n, str(n)) for n in (16, 128, 1024, 4096)], log=True)
    return chart(
        f"{gpu.upper()}: prompt tokens a second", x, Axis("tokens/s", even_marks(top)), series,
        _EMULATED,
    )  # fmt: skip


def _ms(series: Sequence[Series]) -> Axis:
    top = max((y for one in series for _, y in one.points), default=1.0)
    return Axis("milliseconds", even_marks(top))


def _tokens(title: str) -> Axis:
    return Axis(title, [(n, _short(n)) for n in (1 << 10, 8 << 10, 128 << 10, 1 << 20)], log=True)


def _short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >> 20 else f"{tokens >> 10}k"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.bench_plot", description=__doc__
    )
    parser.add_argument("--gpu", default="h200", help="whose tables (default: %(default)s)")
    parser.add_argument("--speed", type=Path, default=FOLDER, metavar="DIR", help="the tables")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", metavar="DIR", help="drawings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
