"""`python -m ultraflash.server` as somebody types it: every early mistake is one sentence."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.chat_vectors import TINY
from ultraflash.server.config import SETTINGS, ServerConfig
from ultraflash.server.errors import StartError
from ultraflash.server.run_dir import remove_run_dir


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ultraflash.server", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def one_sentence(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    shutil.copytree(TINY / "ckpt", folder)
    return folder


def test_help_teaches() -> None:
    result = run("--help")
    assert result.returncode == 0
    for words in ("--checkpoint", "curl -sN", "/readyz", "UF_CACHE_DIR", "Exit status"):
        assert words in result.stdout


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = one_sentence(run("--port", str(port)))
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use)" in text
    assert "--port 0 takes a free one" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000"),
        (["--port", "-1"], "port (UF_PORT) must be at least 0, got -1"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--checkpoint", "/nowhere"], "checkpoint /nowhere is no directory"),
        (["--context", "0"], "context (UF_CONTEXT) must be at least 1, got 0"),
        (["--context", "99999999"], "context 99999999 is beyond the"),
        (["--world", "3"], "world 3 does not divide"),
        (["--gpus", "0,1,2"], "world 3 does not divide"),
        (["--gpus", "0,one"], "UF_GPUS=0,one is malformed: expected GPU numbers like 0 or 0,1"),
        (["--max-sequences", "0"], "max-sequences (UF_MAX_SEQUENCES) must be at least 1"),
        (["--weights", "synthetic"], "--weights synthetic is for benchmarks"),
        (["--max-sequences", "9"], "max_sequences 9 is more than the 8 rows"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str) -> None:
    assert words in one_sentence(run(*arguments))


def test_wrong_variables() -> None:
    assert "UF_PORT=x is malformed" in one_sentence(run(UF_PORT="x"))
    assert "UF_BACKEND=abacus is malformed" in one_sentence(run(UF_BACKEND="abacus"))


@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_seconds_are_finite(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UF_GRACEFUL_SECONDS", value)
    with pytest.raises(StartError) as caught:
        ServerConfig.from_env()
    assert str(caught.value) == (
        f"graceful-seconds (UF_GRACEFUL_SECONDS) must be finite and at least 0, got {value}"
    )


def test_a_cache_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = one_sentence(run("--port", "0", UF_CACHE_DIR=str(tmp_path / "file" / "cache")))
    assert "is not writable (Not a directory): set UF_CACHE_DIR" in text


def test_a_temporary_directory_too_deep_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    text = one_sentence(run("--port", "0", TMPDIR=str(deep)))
    assert "too long for a Unix socket" in text
    assert "set TMPDIR" in text
    assert not list(deep.iterdir())


def test_gunicorn_alone_says_what_is_wrong_with_a_variable() -> None:
    settings = "python:ultraflash.server.gunicorn_conf"
    result = subprocess.run(
        [sys.executable, "-m", "gunicorn", "-c", settings, "ultraflash.server.wsgi:app"],
        env={**os.environ, "UF_PORT": "x"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: UF_PORT=x is malformed")
    assert "Traceback" not in result.stderr


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "holds no config.json" in one_sentence(run("--checkpoint", str(tmp_path)))


def test_a_tokenizer_of_another_model(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("<\uff5cSystem\uff5c>", "<system>"), "utf-8")
    text = one_sentence(run("--checkpoint", str(checkpoint)))
    assert "dspark_noise_token_id is 486 but" in text


def test_a_configuration_survives_the_way_through_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ServerConfig(
        checkpoint=tmp_path, port=7, context=9, drain_s=0.5, run_dir=tmp_path, listen_fd=3
    )
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    assert ServerConfig.from_env() == ServerConfig()
    for name, value in config.variables().items():
        monkeypatch.setenv(name, value)
    assert ServerConfig.from_env() == config


def test_derived_settings(tmp_path: Path) -> None:
    config = ServerConfig(max_sequences=2, max_waiting=3)
    assert (config.max_live, config.max_entered, config.threads) == (5, 29, 37)
    assert config.address == "127.0.0.1:8000"
    assert ServerConfig(host="::1").address == "[::1]:8000"
    assert ServerConfig(listen_fd=5).address == "fd://5"
    with pytest.raises(StartError, match="UF_RUN_DIR is not set"):
        _ = config.socket_path
    made = config.with_run_dir()
    assert made.socket_path.parent.stat().st_mode & 0o777 == 0o700
    remove_run_dir(made.socket_path.parent)
    assert made.with_run_dir() is made
