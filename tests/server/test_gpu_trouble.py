"""What clients and /readyz are told when there is no GPU, or one that fails: real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from helpers.devices import num_gpus
from helpers.live_server import REAL, LiveServer, eventually
from helpers.trouble_engine import LOST

pytest.importorskip("cuda.bindings")

_AGAIN = "the engine process ended and is started again soon: exit status "
_SENTENCES = {
    "no driver": "GPU 0 was asked for, but there is no NVIDIA driver (libcuda.so.1): install "
    "driver 580 or later, or run on the CPU with UF_BACKEND=numpy",
    "old driver": "the driver supports CUDA 12.8, CUDA 13.0 is needed: update the driver to 580 "
    "or later, or run on the CPU with UF_BACKEND=numpy",
    "wrong architecture": "GPU 0 (NVIDIA GeForce RTX 4090) is sm_89a, kernels exist for sm_90a, "
    "sm_100a, sm_103a: use a Hopper or Blackwell GPU, or run on the CPU with UF_BACKEND=numpy",
    "out of memory": " GiB of GPU memory, 0.00 of 0.00 GiB are free: lower the context or "
    "--max-sequences, or end what else runs on this GPU",
}


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what is wrong with the GPU; nothing, to begin with."""
    path = tmp_path / "trouble"
    path.write_text("")
    monkeypatch.setenv("UF_TEST_TROUBLE", str(path))
    monkeypatch.setenv("UF_TEST_ENGINE", "trouble_engine.py")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for its helpers
    return path


@pytest.fixture
def server(tmp_path: Path, trouble: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def test_a_gpu_that_is_lost_and_what_it_says_until_it_is_back(
    server: LiveServer, trouble: Path
) -> None:
    trouble.write_text("no driver")
    with server.stream(seed=LOST, max_tokens=90_000) as stream:
        *deltas, last = stream.events()
    assert any(delta["choices"][0]["delta"].get("content") for delta in deltas)
    assert last["error"]["code"] == "engine_lost"
    assert "send it again" in last["error"]["message"]
    lost = "a step failed: CUDA_ERROR_ECC_UNCORRECTABLE (ecc uncorrectable): this process has lost "
    seen: list[str] = []
    for name, sentence in _SENTENCES.items():
        trouble.write_text(name)
        eventually(partial(said, server, seen, sentence))
        assert seen[-1].startswith(f"{_AGAIN}78: "), "it will fail again, but a GPU may come back"
    assert any(f"exit status 1: {lost}the GPU" in reason for reason in seen)
    trouble.write_text("")
    server.wait_ready()
    assert server.chat(max_tokens=2).status == 200


def said(server: LiveServer, seen: list[str], sentence: str) -> bool:
    """Whether /readyz has come to say this; what it says on the way is kept."""
    reply = server.get("/readyz")
    assert reply.status == 503
    if not seen or seen[-1] != reply.json["reason"]:
        seen.append(reply.json["reason"])
    return reply.json["status"] == "restarting" and sentence in seen[-1]


@pytest.mark.skipif(num_gpus() > 0, reason="this machine has a GPU")
def test_a_server_that_is_to_run_on_a_gpu_that_is_not_there_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UF_BACKEND", "cuda")
    server = LiveServer(tmp_path, settings_file=REAL)
    server.events.close()  # the real engine reports nothing
    assert server.process.wait(60) == 78
    assert "error: GPU 0 was asked for, but " in server.log
    assert "or run on the CPU with UF_BACKEND=numpy\n" in server.log
    assert "Traceback" not in server.log
    assert not server.children()
    assert not os.path.exists(server.config.status_path)
