from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.chat_vectors import rejected
from ultraflash.server.errors import RequestError
from ultraflash.server.models import MODEL_NAMES
from ultraflash.server.protocol import ChatProtocol
from ultraflash.server.schema import ChatBody, parse_chat

HELLO = [{"role": "user", "content": "Hello"}]


def parse(**fields: Any) -> ChatBody:
    return parse_chat({"model": "deepseek-v4.1-flash", "messages": HELLO, **fields})


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value


def test_defaults() -> None:
    body = parse()
    assert (body.temperature, body.top_p, body.top_k, body.seed) == (1.0, 1.0, 0, None)
    assert (body.max_tokens, body.min_tokens, body.ignore_eos, body.stops) == (None, 0, False, ())
    assert (body.stream, body.include_usage, body.usage_in_each) == (False, False, False)


@pytest.mark.parametrize("case", rejected(), ids=lambda case: case["id"])
def test_what_the_official_converter_refuses_is_refused(
    case: dict[str, Any], protocol: ChatProtocol
) -> None:
    with pytest.raises(RequestError) as caught:
        protocol.prepare(parse(**case["request"]), 1 << 20)
    assert caught.value.status == (404 if "model" in case["request"] else 400)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "from 1 to 393216, got 0"),
        ({"max_tokens": -5}, "max_tokens", "got -5"),
        ({"max_tokens": 1.0}, "max_tokens", "integer, not a number"),
        ({"max_tokens": True}, "max_tokens", "integer, not a boolean"),
        ({"max_tokens": "9"}, "max_tokens", "integer, not a string"),
        ({"max_tokens": 10**40}, "max_tokens", "far outside"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "one of them"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "more than max_tokens 2"),
        ({"temperature": 2.5}, "temperature", "from 0 to 2, got 2.5"),
        ({"temperature": "hot"}, "temperature", "number, not a string"),
        ({"temperature": 10**400}, "temperature", "far outside"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "from -1"),
        ({"seed": 2**63}, "seed", "far outside"),
        ({"stop": [""]}, "stop", "1 to 1024 bytes"),
        ({"stop": "x" * 1025}, "stop", "1 to 1024 bytes"),
        ({"stop": 7}, "stop", "array, not an integer"),
        ({"stream": "yes"}, "stream", "boolean, not a string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "boolean",
        ),
        ({"messages": "hello"}, "messages", "array, not a string"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": ["x"]}, "messages[0]", "object, not a string"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "one of system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "not null"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]", "object"),
        ({"thinking": True}, "thinking", "object, not a boolean"),
        ({"thinking": {"type": "deep"}}, "thinking", "one of enabled"),
        ({"reasoning_effort": "weird"}, "reasoning_effort", "one of none"),
        ({"reasoning_effort": 50}, "reasoning_effort", "one of none"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking", "boolean"),
        ({"tools": {}}, "tools", "array, not an object"),
        ({"model": 7}, "model", "string, not an integer"),
        ({"model": None}, "model", "missing"),
    ],
)
def test_a_wrong_field_is_named_with_its_limit(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(**fields)
    assert error.field == param
    assert words in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("response_format", {"type": "json_object"}),
        ("parallel_tool_calls", False),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{}]),
        ("audio", {}),
        ("guided_json", {}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(**{name: value})
    assert error.field == name
    assert name in error.message


def test_neutral_values_of_such_fields_and_unknown_fields_pass() -> None:
    parse(
        n=1,
        logprobs=False,
        top_logprobs=None,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        response_format={"type": "text"},
        parallel_tool_calls=True,
        tool_choice="auto",
        user="me",
        metadata={"a": "b"},
        some_new_field=[1],
    )


def test_images_are_refused_clearly() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = refused(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, picture]}]
    )
    assert error.field == "messages[0].content[1]"
    assert "text only" in error.message


def test_aliases_of_a_field_mean_the_same() -> None:
    assert parse(max_completion_tokens=7).max_tokens == 7
    assert parse(stop="x").stops == ("x",)
    assert parse(top_k=-1).top_k == 0
    assert parse(chat_template_kwargs={"enable_thinking": False}).prompt["thinking"] == {
        "type": "disabled"
    }
    developer = parse(messages=[{"role": "developer", "content": "Be short."}, *HELLO])
    assert developer.prompt["messages"][0]["role"] == "system"


def test_model_names() -> None:
    assert parse(model="deepseek-ai/DeepSeek-V4.1-Flash").model.thinks
    assert not parse(model="deepseek-chat").model.thinks
    error = refused(model="gpt-" + "x" * 5000)
    assert (error.status, error.code) == (404, "model_not_found")
    assert len(error.message) < 400
    assert all(name in error.message for name in MODEL_NAMES)


def test_an_answer_of_another_client_library_can_be_sent_back(protocol: ChatProtocol) -> None:
    said = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
    }
    body = parse(messages=[*HELLO, said, *HELLO])
    assert "refusal" not in json.dumps(body.prompt)
    protocol.prepare(body, 1000)
