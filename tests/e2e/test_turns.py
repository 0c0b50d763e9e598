"""Conversations of six turns through HTTP: what is reused, and that the answers do not know.

The server keeps state between turns. The yardstick is an engine in this process that keeps none,
driven through the same rendering. The checkpoint is the bundled one, made to end its answers: the
end of a turn looks to it like one of its commonest tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import copy_bundled
from helpers.live_server import MODEL, REAL, LiveServer
from helpers.points import EOS, Rules
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling
from ultraflash.runtime.weights import CheckpointIndex
from ultraflash.server.protocol import ChatProtocol
from ultraflash.server.schema import parse_chat

COMMON = 262
CONTEXT = 2048
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_bundled(tmp_path_factory.mktemp("checkpoint"))
    info = CheckpointIndex.open(folder).tensors["head.weight"]
    row = info.nbytes // info.shape[0]
    with info.file.open("r+b") as stream:
        stream.seek(info.offset + COMMON * row)
        common = stream.read(row)
        stream.seek(info.offset + EOS * row)
        stream.write(common)  # of two equal logits the lower id is the larger
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(
        tmp_path_factory.mktemp("turns"), REAL, checkpoint=checkpoint, context=CONTEXT
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


class Yardstick:
    """The same model without a memory."""

    def __init__(self, checkpoint: Path, cache_dir: Path) -> None:
        config = RuntimeConfig(
            checkpoint=checkpoint, cache_dir=cache_dir, max_seq=CONTEXT, store_bytes=0
        )
        self.engine = Engine.open(config)
        self._protocol = ChatProtocol.from_checkpoint(checkpoint)

    def answer(self, fields: dict[str, Any]) -> tuple[list[int], list[int], dict[str, Any]]:
        """Prompt ids, ids of the answer, `choices[0]` of the response."""
        body = parse_chat(fields)
        prompt = self._protocol.prepare(body, CONTEXT)
        request = Generation(
            tuple(prompt.ids), prompt.max_tokens(body.max_tokens), Sampling(body.temperature)
        )
        self.engine.submit("k", request)
        answer = self._protocol.answer(prompt, "id", body)
        ids: list[int] = []
        while self.engine.has_work:
            for step in self.engine.step():
                ids += step.tokens
                answer.push(step.tokens)
                if step.finish:
                    answer.finish(step.finish)
        return prompt.ids, ids, answer.message()


@pytest.fixture(scope="module")
def yardstick(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Yardstick:
    return Yardstick(checkpoint, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no_tools"])
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "chat"])
def test_six_turns(server: LiveServer, yardstick: Yardstick, thinking: bool, tools: bool) -> None:
    model = yardstick.engine.model
    rules = Rules(model.window, RuntimeConfig().segment_tokens)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Answer {'slowly' if thinking else 'at once'}."}
    ]
    reused: list[int] = []
    finishes: list[str] = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn}: {'why? ' * turn}"})
        fields = {
            "model": MODEL,
            "messages": messages,
            "thinking": {"type": "enabled" if thinking else "disabled"},
            "temperature": 0,
            "max_tokens": 12,
            **({"tools": [TOOL]} if tools else {}),
        }
        prompt, ids, want = yardstick.answer(fields)
        reply = server.send("POST", "/v1/chat/completions", json.dumps(fields).encode())
        assert reply.status == 200, reply.body
        choice, usage = reply.json["choices"][0], reply.json["usage"]
        assert (choice["message"], choice["finish_reason"]) == (
            want["message"],
            want["finish_reason"],
        )
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == rules.best(prompt)
        assert usage["prompt_cache_hit_tokens"] == cached
        assert usage["prompt_cache_miss_tokens"] == len(prompt) - cached
        rules.note(prompt, ids, choice["finish_reason"])
        messages.append({k: v for k, v in choice["message"].items() if v is not None})
        reused.append(cached)
        finishes.append(choice["finish_reason"])
    assert reused == sorted(set(reused)), "every turn reuses more than the one before"
    assert reused[-1] > len(prompt) // 2
    assert "stop" in finishes
