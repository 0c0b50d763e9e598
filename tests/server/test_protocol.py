"""Prompts and parsed answers against the official data; what we add is in test_answer.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import deepseek_recipe as recipe
import pytest

from helpers import chat_vectors
from helpers.chat_vectors import TINY
from helpers.golden_chats import REQUESTS
from ultraflash.server.errors import RequestError, StartError
from ultraflash.server.protocol import ChatProtocol
from ultraflash.server.schema import ChatBody, parse_chat
from ultraflash.server.vocabulary import Vocabulary

MILLION = 1 << 20
VOCABULARY = Vocabulary.from_file(TINY / "ckpt" / "tokenizer.json")
TOKENIZER = recipe.Tokenizer.from_file(str(TINY / "ckpt" / "tokenizer.json"))


def body_of(request: dict[str, Any]) -> ChatBody:
    """As `parse_chat` gives it; also for fields of the prompt that we refuse for now."""
    later = ("response_format", "tool_choice")
    body = parse_chat(
        {"model": "deepseek-v4.1-flash"} | {k: v for k, v in request.items() if k not in later}
    )
    ours = {k: request[k] for k in later if k in request}
    return dataclasses.replace(body, prompt={**body.prompt, **ours})


def with_image(request: dict[str, Any]) -> bool:
    parts = [m["content"] for m in request["messages"] if isinstance(m.get("content"), list)]
    return any(part["type"] != "text" for content in parts for part in content)


RENDERED = [case for case in chat_vectors.rendered() if not with_image(case["request"])]


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: case["id"])
def test_prompt_vectors(protocol: ChatProtocol, case: dict[str, Any]) -> None:
    prompt = protocol.prepare(body_of(case["request"]), MILLION)
    assert text_of(prompt.ids) == case["prompt"]
    spans = [spelling for _, _, spelling in case["special_spans"]]
    # Ids from 482 on are the added tokens of this tokenizer, 0 to 2 the first special ones.
    special = [i for i in prompt.ids if i >= 482 or i < 3]
    assert [text_of([i]) for i in special] == spans
    options = prompt.request.parsing_options
    assert options.parse_tool_calls == case["parse"]["parse_tool_calls"]
    assert stage_name(options) == case["parse"]["initial_stage"]


def test_only_vectors_with_images_are_left_out() -> None:
    assert len(RENDERED) >= len(chat_vectors.rendered()) - 3


@pytest.mark.parametrize("name", REQUESTS)
def test_golden_prompt_ids(protocol: ChatProtocol, name: str) -> None:
    cases = {case["name"]: case["ids"] for case in chat_vectors.prompts_as_ids()}
    assert protocol.prepare(body_of(REQUESTS[name]), MILLION).ids == cases[name]


def test_every_golden_prompt_but_forced_formats_is_checked() -> None:
    names = {case["name"] for case in chat_vectors.prompts_as_ids()}
    assert names - set(REQUESTS) == {"json_object", "schema"}


@pytest.mark.parametrize("cut", ["whole", "single"])
@pytest.mark.parametrize("case", chat_vectors.parsed(), ids=lambda case: case["id"])
def test_parse_vectors(protocol: ChatProtocol, case: dict[str, Any], cut: str) -> None:
    ids = TOKENIZER.encode(case["text"])
    pieces = [ids] if cut == "whole" else [[i] for i in ids]
    assert answer_of(protocol, case["options"], pieces) == case["official"]


@pytest.mark.parametrize("case", chat_vectors.parsed_pieces(), ids=lambda case: case["id"])
def test_marks_spelled_with_ordinary_tokens_are_text(
    protocol: ChatProtocol, case: dict[str, Any]
) -> None:
    pieces = [TOKENIZER.encode(piece) for piece in case["pieces"]]
    assert answer_of(protocol, case["options"], pieces) == case["expected"]


def text_of(ids: list[int]) -> str:
    return b"".join(map(VOCABULARY.of, ids)).decode()


def stage_name(options: recipe.ParsingOptions) -> str:
    stages = recipe.ThinkingInitialStage
    names = {
        "reasoning_start": stages.ReasoningStart,
        "reasoning_continuation": stages.ReasoningContinuation,
        "content_continuation": stages.ContentContinuation,
    }
    stage = options.thinking_initial_stage
    return next((name for name, value in names.items() if value == stage), "answer")


def answer_of(
    protocol: ChatProtocol, options: dict[str, Any], pieces: list[list[int]]
) -> dict[str, Any]:
    """The message that these ids are, in the shape of the vectors."""
    body = body_of(request_for(options))
    prompt = protocol.prepare(body, MILLION)
    if options.get("starts_in_tool_calls"):
        assert prompt.request.parsing_options.starts_in_tool_calls
    answer = protocol.answer(prompt, "id", body)
    for piece in pieces:
        answer.push(piece)
    answer.finish(options.get("engine_finish", "stop"))
    choice = answer.message()
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "reasoning_content": message.get("reasoning_content", ""),
        "content": message["content"],
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }


def request_for(options: dict[str, Any]) -> dict[str, Any]:
    """A request whose answer is parsed with these options."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    request: dict[str, Any] = {"messages": messages, "stop": options.get("stop", [])}
    match options["initial_stage"]:
        case "answer":
            request["thinking"] = {"type": "disabled"}
        case "content_continuation":
            messages.append({"role": "assistant", "content": "x", "prefix": True})
        case "reasoning_continuation":
            said = {"role": "assistant", "content": "", "reasoning_content": "x"}
            messages.append({**said, "prefix": True})
    if options["parse_tool_calls"]:
        request["tools"] = [{"type": "function", "function": {"name": "clock"}}]
    if options.get("starts_in_tool_calls"):
        request["tool_choice"] = "required"
    return request


def test_a_prompt_that_fills_the_context_is_refused_in_the_words_clients_look_for(
    protocol: ChatProtocol,
) -> None:
    body = body_of({"messages": [{"role": "user", "content": "Hello"}]})
    length = len(protocol.prepare(body, MILLION).ids)
    assert protocol.prepare(body, length + 1).max_tokens(None) == 1
    with pytest.raises(RequestError, match=f"maximum context length is {length} tokens") as caught:
        protocol.prepare(body, length)
    assert (caught.value.field, caught.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("in_parts", [False, True])
def test_text_that_cannot_fit_is_refused_before_it_is_encoded(
    protocol: ChatProtocol, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    text = "Hello" * 1_000_000
    content = [{"type": "text", "text": text}] if in_parts else text
    body = body_of({"messages": [{"role": "user", "content": content}]})
    monkeypatch.setattr(protocol, "_encoding", None)
    with pytest.raises(RequestError, match=r"have at least [0-9]+: shorten") as caught:
        protocol.prepare(body, 1024)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "default"),
    [
        ({}, 65_536),
        ({"reasoning_effort": "max"}, 131_072),
        ({"thinking": {"type": "disabled"}}, 8_192),
        ({"model": "deepseek-chat"}, 8_192),
        ({"model": "deepseek-chat", "thinking": {"type": "enabled"}}, 65_536),
        ({"model": "deepseek-reasoner"}, 65_536),
    ],
)
def test_default_length_of_an_answer(
    protocol: ChatProtocol, fields: dict[str, Any], default: int
) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    body = parse_chat({"model": "deepseek-flash", "messages": hello, **fields})
    prompt = protocol.prepare(body, MILLION)
    assert prompt.max_tokens(None) == default
    assert prompt.max_tokens(7) == 7
    tight = protocol.prepare(body, len(prompt.ids) + 5)
    assert tight.max_tokens(None) == tight.max_tokens(7) == 5


def test_a_checkpoint_without_a_tokenizer_or_with_another_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_bytes((TINY / "ckpt" / "config.json").read_bytes())
    with pytest.raises(StartError, match=r"tokenizer\.json cannot be read"):
        ChatProtocol.from_checkpoint(tmp_path)
    text = (TINY / "ckpt" / "tokenizer.json").read_text("utf-8")
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    (tmp_path / "tokenizer.json").write_text(text.replace(end, "<end>"), "utf-8")
    with pytest.raises(StartError, match="eos_token_id is 1 but"):
        ChatProtocol.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text.replace("</think>", "</tink>"), "utf-8")
    with pytest.raises(StartError, match=r"spells </think> with . tokens"):
        ChatProtocol.from_checkpoint(tmp_path)
