"""Charts that come from the tables alone."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ultraflash.tools import bench_plot
from ultraflash.tools.svg_chart import Axis, Series, chart, even_marks

SVG = "{http://www.w3.org/2000/svg}"


def table(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def speed(tmp_path: Path) -> Path:
    """Two worlds, eight widths, two contexts; one measurement was taken again."""
    common = {"model": "released model", "routing": "random", "read_tb_per_s": 4.5}
    decode: list[dict[str, object]] = [
        {"world": world, "rows": rows, "context": context, "read_gb": 9.0, **common,
         "step_p50_ms": 3.0 + rows}
        for world in (4, 8) for rows in range(1, 9) for context in (8192, 1 << 20)
    ]  # fmt: skip
    decode.append({**decode[0], "step_p50_ms": 99.0})
    prefill: list[dict[str, object]] = [
        {"model": "released model", "world": 8, "chunk": chunk, "context": 8192,
         "prefill": "full", "plan": "part", "tokens_per_s": 10.0 * chunk}
        for chunk in (16, 4096)
    ]  # fmt: skip
    table(tmp_path / "h200_decode.csv", decode)
    table(tmp_path / "h200_prefill.csv", prefill)
    return tmp_path


def test_the_tables_become_drawings(speed: Path) -> None:
    assert bench_plot.main(["--speed", str(speed), "--docs", str(speed)]) == 0
    drawing = ElementTree.parse(speed / "h200_step_by_rows.svg").getroot()
    lines = drawing.findall(f"{SVG}polyline")
    assert len(lines) == 4  # measured and read-only, two worlds
    assert len(lines[0].attrib["points"].split()) == 8
    words = " ".join(t.text or "" for t in drawing.iter(f"{SVG}text"))
    assert "shard step, emulated" in words
    assert "world 8, reading" in words
    top = max(float(t.text or "") for t in drawing.iter(f"{SVG}text") if (t.text or "").isdigit())
    assert top >= 99, "the newest measurement counts"
    for name in ("h200_step_by_context.svg", "h200_prefill.svg"):
        assert ElementTree.parse(speed / name).getroot().findall(f"{SVG}polyline")


def test_nothing_to_draw_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_plot.main(["--speed", str(tmp_path)]) == 1
    assert "h200_decode.csv" in capsys.readouterr().err
    table(tmp_path / "h200_decode.csv", [{"model": "tiny"}])
    assert bench_plot.main(["--speed", str(tmp_path)]) == 1
    assert "has no rows of the released model: run the benchmarks" in capsys.readouterr().err


def test_points_stand_where_their_values_say() -> None:
    axis = Axis("x", [(1, "1"), (100, "100")], log=True)
    assert axis.share(10) == pytest.approx(0.5)
    text = chart("t", axis, Axis("y", [(0, "0"), (2, "2")]), [Series("a<b", [(1, 0), (100, 2)])])
    line = ElementTree.fromstring(text).find(f"{SVG}polyline")
    assert line is not None
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in line.attrib["points"].split())
    assert x0 < x1
    assert y0 > y1
    assert "a&lt;b" in text


@pytest.mark.parametrize(("top", "last"), [(99.0, 100), (0.9, 1.0), (7.2, 8), (1.0, 1)])
def test_marks_are_round_and_reach_the_top(top: float, last: float) -> None:
    marks = even_marks(top)
    assert marks[0] == (0, "0")
    assert marks[-1][0] == pytest.approx(last)
    assert len(marks) <= 7


def test_a_missing_table_is_named_with_what_makes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench_plot.main(["--speed", str(tmp_path), "--docs", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"bench_plot: there is no table {tmp_path / 'h200_decode.csv'}: ")
    assert said.endswith("python -m ultraflash.tools.bench_decode --csv\n")
