from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import helpers
from ultraflash.tools import demo
from ultraflash.tools.local_server import LocalServer

STAND_IN = (sys.executable, str(Path(helpers.__path__[0]) / "stand_in_server.py"))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with LocalServer(*getattr(request, "param", ()), command=STAND_IN) as server:
        server.wait_ready(20)
        yield server.url


def test_answer_and_summary(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--url", url, "--max-tokens", "32", "--prompt", "count"]) == 0
    out = capsys.readouterr().out
    assert "stand-in < count" in out
    assert "one two three four\nfive \ufffd[31msix seven eight\n" in out, "escapes are disarmed"
    assert out.splitlines()[-1].startswith("32 tokens, ")
    assert " tokens/s, first token after " in out.splitlines()[-1]


def test_a_terminal_sees_every_line(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "16")
    assert demo.main(["--url", url, "--max-tokens", "400"]) == 0
    out = capsys.readouterr().out
    assert out.count("eight") >= 25
    assert "tokens/s" in out
    assert "\x1b[31m" not in out


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (["--refuse"], "demo: 400: max_tokens is 0; the least is 1"),
        (["--break-off"], "demo: the server closed the stream before its end"),
        (["--error-event"], "demo: the engine process ended"),
    ],
    indirect=["url"],
)
def test_trouble_is_one_sentence(
    url: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--url", url]) == 1
    assert capsys.readouterr().err == sentence + "\n"


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


@given(st.text(), st.integers(2, 40))
def test_wrapping_loses_nothing_but_spaces(text: str, width: int) -> None:
    text = demo._printable(text)
    lines = demo._wrap(text, width)
    assert "".join(lines).replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert all(cell_len(line) <= width for line in lines)
