"""What clients and /readyz are told when there is no GPU, or one that fails: real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.devices import num_gpus
from helpers.live_server import REAL, LiveServer, Reply, eventually
from helpers.trouble_engine import LOST
from ultraflash.server.status import ChildStatus, read_status

pytest.importorskip("cuda.bindings")

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
_LOST = (
    "a step failed: CUDA_ERROR_ECC_UNCORRECTABLE (ecc uncorrectable): this process has lost the "
    "GPU and must start again, UF_CHECK=1 would name the node"
)
Start = Callable[..., LiveServer]


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
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LiveServer] = []

    def start(**settings: Any) -> LiveServer:
        started.append(LiveServer(tmp_path, gpus="0", **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize("name", _SENTENCES)
def test_a_gpu_that_cannot_be_had_is_told_and_tried_again(
    start: Start, trouble: Path, name: str
) -> None:
    trouble.write_text(name)
    server, sentence = start(), _SENTENCES[name]
    eventually(partial(says, server, sentence))
    engine = eventually(lambda: (e := engine_of(server)).restarts >= 2 and e)
    assert engine.exit == "exit status 69"
    assert says(server, sentence), "and goes on saying it"
    assert server.get("/healthz").status == 200
    refused = server.chat()
    assert (refused.status, refused.error["code"]) == (503, "not_ready")
    assert refused.headers["Retry-After"]
    assert sentence in refused.error["message"]
    told = [line for line in server.log.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, "the terminal hears it once, not with every try"
    assert told[0].endswith(sentence)
    assert server.log.count("the engine process ended (exit status 69)") == 1
    assert "Traceback" not in server.log

    trouble.write_text("")
    server.wait_ready()
    assert server.chat(max_tokens=2).status == 200
    assert server.stop() == 0


def test_a_gpu_that_is_lost_and_what_it_says_until_it_is_back(start: Start, trouble: Path) -> None:
    server = start()
    server.wait_ready()
    trouble.write_text("no driver")
    with server.stream(seed=LOST, max_tokens=90_000) as stream:
        *deltas, last = stream.events()
    assert any(delta["choices"][0]["delta"].get("content") for delta in deltas)
    assert last["error"]["code"] == "engine_lost"
    assert "send it again" in last["error"]["message"]
    eventually(partial(says, server, _LOST))
    for name, sentence in _SENTENCES.items():
        trouble.write_text(name)
        eventually(partial(says, server, sentence))
    for sentence in (_LOST, *_SENTENCES.values()):
        lines = [line for line in server.log.splitlines() if line.startswith("error: ")]
        assert sum(line.endswith(sentence) for line in lines) == 1
    trouble.write_text("")
    server.wait_ready()
    assert server.chat(max_tokens=2).status == 200


def says(server: LiveServer, sentence: str) -> bool:
    """Whether /readyz says this sentence and no more; what it says meanwhile is of its kind."""
    reply = server.get("/readyz")
    assert reply.status == 503, server.log
    assert reply.headers["Retry-After"]
    assert reply.json["status"] in ("starting", "restarting", "unavailable")
    return reply.json["status"] == "unavailable" and reply.json["reason"].endswith(sentence)


def engine_of(server: LiveServer) -> ChildStatus:
    status = read_status(server.config.status_path)
    assert status is not None
    return status.children["engine"]


@pytest.mark.skipif(num_gpus() > 0, reason="this machine has a GPU")
def test_the_real_engine_on_a_gpu_that_is_not_there(start: Start) -> None:
    """Naming it is enough: nobody who asks for a GPU is served by the CPU in silence."""
    server = start(settings_file=REAL)

    def unavailable() -> Reply | None:
        reply = server.get("/readyz")
        return reply if reply.json["status"] == "unavailable" else None

    reply = eventually(unavailable)
    assert reply.status == 503
    assert reply.json["reason"].startswith("GPU 0 was asked for, but ")
    assert reply.json["reason"].endswith("or run on the CPU with UF_BACKEND=numpy")
    assert "Traceback" not in server.log
    assert server.stop() == 0
    assert not server.children()
    assert not server.config.status_path.parent.exists()
