from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ultraflash.tools import bench_serve
from ultraflash.tools.chat_client import Meter
from ultraflash.tools.speed_table import append

RESULT = bench_serve.Result(
    date="2030-01-01",
    commit="abc",
    machine="a machine, with a comma",
    cores=2,
    load=0.1,
    python="3.11",
    numpy="2",
    checkpoint="bundled",
    runs=3,
    prompt_tokens=20,
    tokens=200,
    ready_s=1.5,
    memory_mib=300.0,
    first_token_ms=50.0,
    tokens_per_s=40.0,
    drafted_tokens_per_s=60.0,
    accepted_per_step=2.5,
    rows_per_step=4.0,
    warm_first_token_ms=20.0,
)


def test_rows_share_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cpu.csv"
    for _ in range(2):
        append(path, RESULT)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["machine"] for row in rows] == ["a machine, with a comma"] * 2
    assert rows[0]["tokens_per_s"] == "40.0"


def _chunk(text: str, tokens: int | None) -> dict[str, object]:
    usage = None if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 7}
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}], "usage": usage}


@pytest.mark.parametrize("option", ["--runs", "--tokens"])
def test_nothing_cannot_be_measured(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_serve.main([option, "0"])
    assert caught.value.code == 2
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


def test_speed_counts_the_tokens_after_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.25, 10.75, 11.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter = Meter(started=10.0)
    next(clock)
    for tokens in (4, 7, 10):  # several tokens a chunk, as with drafting
        meter.feed(_chunk("x", tokens))
    meter.feed({"choices": [], "usage": {"completion_tokens": 10, "prompt_tokens": 7}})
    assert meter.first_token_ms == 250.0
    assert meter.tokens_per_s == 6.0
    assert (meter.tokens, meter.prompt_tokens) == (10, 7)


def test_a_server_without_running_usage_is_counted_by_chunks() -> None:
    meter = Meter()
    for _ in range(3):
        meter.feed(_chunk("x", None))
    assert meter.tokens == 3
