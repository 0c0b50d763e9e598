"""The whole road: command, gunicorn, supervisor, engine on the bundled checkpoint, and back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.live_server import REAL, LiveServer, eventually, text_of
from ultraflash.runtime.config import BUNDLED_CHECKPOINT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path_factory.mktemp("real"), REAL)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LiveServer]:
    """One that a test may harm."""
    server = LiveServer(tmp_path, REAL)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def test_a_streamed_and_a_whole_answer_agree(server: LiveServer) -> None:
    fields = {"max_tokens": 24, "temperature": 0}
    with server.stream("Tell me a story.", **fields) as stream:
        *chunks, done = stream.events()
    whole = server.chat("Tell me a story.", **fields).json
    assert done == "[DONE]"
    assert text_of(chunks) == whole["choices"][0]["message"]["content"] != ""
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_a_seed_repeats_an_answer_beside_other_requests(server: LiveServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 16, "seed": 7, "temperature": 1.5}
    alone = server.chat(**fields).json["choices"][0]["message"]
    with server.stream("Something else", max_tokens=4000) as other:
        next(other.events())
        beside = server.chat(**fields).json["choices"][0]["message"]
    assert alone == beside


def test_wild_sampling_never_breaks_an_answer(server: LiveServer) -> None:
    for seed in range(3):
        fields = {"max_tokens": 40, "seed": seed, "temperature": 2}
        reply = server.chat("Hello", thinking=..., **fields)
        assert reply.status == 200
        assert reply.json["usage"]["completion_tokens"] <= 40


def test_ignore_eos_gives_as_many_tokens_as_asked_for(server: LiveServer) -> None:
    reply = server.chat(max_tokens=40, ignore_eos=True, temperature=2, seed=1)
    assert reply.json["usage"]["completion_tokens"] == 40
    assert reply.json["choices"][0]["finish_reason"] == "length"


def test_an_answer_is_cut_to_the_room_left(tmp_path: Path) -> None:
    server = LiveServer(tmp_path, REAL, context=64)
    try:
        server.wait_ready()
        reply = server.chat("Hi", max_tokens=5000, ignore_eos=True)
        assert reply.json["usage"]["total_tokens"] == 64
        assert reply.json["choices"][0]["finish_reason"] == "length"
        long = server.chat("Hello " * 40)
        assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 64 tokens" in long.error["message"]
    finally:
        server.close()


def test_a_killed_engine_comes_back(own_server: LiveServer) -> None:
    with own_server.stream(max_tokens=4000, ignore_eos=True) as stream:
        events = stream.events()
        next(events)
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        *_, last = events
    assert time.monotonic() - killed < 1.0
    assert last["error"]["code"] == "engine_lost"
    not_ready = eventually(lambda: (r := own_server.get("/readyz")).status == 503 and r)
    assert not_ready.json["reason"]
    own_server.wait_ready()
    assert own_server.chat(max_tokens=2).status == 200


def test_a_killed_master_leaves_no_process(own_server: LiveServer) -> None:
    assert len(own_server.children()) == 3
    own_server.process.kill()
    own_server.process.wait()
    eventually(lambda: not own_server.children())


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ultraflash.server", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    return folder


def test_a_truncated_shard_ends_the_command_with_its_sentence(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - 100)
    result = run_command("--checkpoint", str(checkpoint))
    assert result.returncode == 78
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert shard.name in errors[0]
    assert "Traceback" not in result.stderr


def test_the_command_prints_a_free_port_and_serves_on_it() -> None:
    command = [sys.executable, "-m", "ultraflash.server", "--port", "0", "--drain-seconds", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert re.match(r"listening on http://127\.0\.0\.1:\d+ ", first)
        ready = next(line for line in process.stdout if "engine ready" in line)
        assert "context 8192 tokens" in ready
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
