"""A chat request body -> `ChatBody`, or `RequestError` naming the field.

Fields that we do not know are ignored; a field that would change the answer and is not supported is
refused by name, never dropped in silence. null means absent. What concerns the prompt stays in the
shape of the body, normalised, for the model authors' converter (`protocol.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ultraflash.server.body import json_type
from ultraflash.server.errors import RequestError
from ultraflash.server.fields import array, boolean, integer, mapping, number, string
from ultraflash.server.models import ModelName, find_model

MAX_MAX_TOKENS = 393_216
MAX_STOPS, MAX_STOP_BYTES = 16, 1024
MAX_TOOLS = 512

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
_THINKING = ("enabled", "disabled", "adaptive")
_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


@dataclass(frozen=True)
class ChatBody:
    """A chat request, checked; `prompt` holds the fields that the converter takes."""

    requested_model: str
    model: ModelName
    prompt: dict[str, Any]
    stops: tuple[str, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stream: bool
    include_usage: bool
    usage_in_each: bool


def parse_chat(body: dict[str, Any]) -> ChatBody:
    """Check a body of `/v1/chat/completions`.

    Raises:
        RequestError: 400 naming the field, or 404 for an unknown model.
    """
    name = string(body, "model")
    if name is None:
        raise RequestError("model", "model is missing: name one of GET /v1/models")
    model = find_model(name)
    _refuse_unsupported(body)
    stream = boolean(body, "stream")
    include_usage, usage_in_each = _stream_options(body, stream)
    max_tokens = _max_tokens(body)
    min_tokens = integer(body, "min_tokens", 0, MAX_MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        text = f"min_tokens {min_tokens} is more than max_tokens {max_tokens}: lower it"
        raise RequestError("min_tokens", text)
    temperature = number(body, "temperature", 0, 2)
    top_p = number(body, "top_p", 0, 1)
    if top_p == 0:
        raise RequestError("top_p", "top_p must be above 0 and at most 1, got 0")
    stops = _stops(body)
    return ChatBody(
        requested_model=name,
        model=model,
        prompt=_prompt_fields(body, stops),
        stops=stops,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=boolean(body, "ignore_eos"),
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, integer(body, "top_k", -1, 2**31 - 1) or 0),
        seed=integer(body, "seed", 0, 2**63 - 1),
        stream=stream,
        include_usage=include_usage,
        usage_in_each=usage_in_each,
    )


# Field -> (values that change nothing, what to do instead). Everything else is refused.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "send one request for each answer"),
    "best_of": ((1,), "leave it out"),
    "logprobs": ((False,), "leave it out"),
    "top_logprobs": ((0,), "leave it out"),
    "prompt_logprobs": ((0,), "leave it out"),
    "logit_bias": (({},), "leave it out"),
    "presence_penalty": ((0,), "leave it out or send 0"),
    "frequency_penalty": ((0,), "leave it out or send 0"),
    "repetition_penalty": ((1,), "leave it out or send 1"),
    "length_penalty": ((1,), "leave it out or send 1"),
    "min_p": ((0,), "use top_p"),
    "use_beam_search": ((False,), "leave it out"),
    "stop_token_ids": (([],), "use stop"),
    "bad_words": (([],), "leave it out"),
    "response_format": (({"type": "text"},), "ask for the form in the prompt"),
    "parallel_tool_calls": ((True,), "use the first call of the answer"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "modalities": ((["text"],), "leave it out"),
    "audio": ((), "leave it out"),
    "web_search_options": ((), "leave it out"),
    "guided_json": ((), "leave it out"),
    "guided_regex": ((), "leave it out"),
    "guided_choice": ((), "leave it out"),
    "guided_grammar": ((), "leave it out"),
    "structured_outputs": ((), "leave it out"),
    "logits_processors": ((), "leave it out"),
}


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, (neutral, instead) in _UNSUPPORTED.items():
        value = body.get(name)
        # True == 1 in Python, not in JSON.
        same = (v for v in neutral if v == value and isinstance(v, bool) == isinstance(value, bool))
        if value is not None and next(same, None) is None:
            raise RequestError(name, f"{name} is not supported with this value: {instead}")
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        text = "tool_choice must be none or auto (forced calls are not supported): leave it out"
        raise RequestError("tool_choice", text)


def _prompt_fields(body: dict[str, Any], stops: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": _messages(body)}
    tools = array(body, "tools")
    if tools is not None:
        if len(tools) > MAX_TOOLS:
            raise RequestError("tools", f"{len(tools)} tools; at most {MAX_TOOLS} are allowed")
        fields["tools"] = tools
        if body.get("tool_choice") is not None:
            fields["tool_choice"] = body["tool_choice"]
    if stops:
        fields["stop"] = list(stops)
    thinking = _thinking(body)
    if thinking is not None:
        fields["thinking"] = {"type": thinking}
    effort = body.get("reasoning_effort")
    if effort is not None:
        if effort not in _EFFORTS:
            text = f"reasoning_effort must be one of {', '.join(_EFFORTS)}"
            raise RequestError("reasoning_effort", text)
        fields["reasoning_effort"] = effort
    return fields


def _thinking(body: dict[str, Any]) -> str | None:
    """`thinking.type`, or what the template arguments of other servers' clients say."""
    thinking = mapping(body, "thinking")
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in _THINKING:
            raise RequestError("thinking", f"thinking.type must be one of {', '.join(_THINKING)}")
        return str(kind)
    arguments = mapping(body, "chat_template_kwargs") or {}
    for name in ("thinking", "enable_thinking"):
        value = arguments.get(name)
        if value is None:
            continue
        if not isinstance(value, bool):
            field = f"chat_template_kwargs.{name}"
            raise RequestError(field, f"{field} must be a boolean, not {json_type(value)}")
        return "enabled" if value else "disabled"
    return None


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = array(body, "messages")
    if not messages:
        raise RequestError("messages", "messages is missing or empty: send at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(where, f"{where} must be an object, not {json_type(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{where}.content[{i}]")
    elif not (isinstance(content, str) or (content is None and role == "assistant")):
        text = f"{where}.content must be a string or an array of parts, not {json_type(content)}"
        raise RequestError(f"{where}.content", text)
    # The converter knows no developer role; DeepSeek's own service reads it as system.
    given = {name: value for name, value in message.items() if value is not None}
    return given | {"role": "system" if role == "developer" else role, "content": content}


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise RequestError(where, f"{where} must be an object, not {json_type(part)}")
    kind = part.get("type")
    if isinstance(kind, str) and "image" in kind:
        raise RequestError(
            where, f"{where} is an image, and this server reads text only: remove it"
        )
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(where, f"{where} must be a text part: {{'type': 'text', 'text': …}}")


def _stream_options(body: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    options = mapping(body, "stream_options")
    if options is None:
        return False, False
    if not stream:
        raise RequestError("stream_options", "stream_options needs stream: true")
    include = boolean(options, "include_usage", "stream_options.")
    return include, boolean(options, "continuous_usage_stats", "stream_options.")


def _max_tokens(body: dict[str, Any]) -> int | None:
    old = integer(body, "max_tokens", 1, MAX_MAX_TOKENS)
    new = integer(body, "max_completion_tokens", 1, MAX_MAX_TOKENS)
    if old is not None and new is not None and old != new:
        text = f"max_tokens is {old} and max_completion_tokens is {new}: send one of them"
        raise RequestError("max_completion_tokens", text)
    return new if old is None else old


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else array(body, "stop") or []
    if len(stops) > MAX_STOPS:
        raise RequestError("stop", f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
            text = f"each stop must be a string of 1 to {MAX_STOP_BYTES} bytes"
            raise RequestError("stop", text)
    return tuple(stops)
