"""Streams one chat answer over HTTP and times it, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ultraflash.tools.local_server import ServerError, connect, get

# No token for this long means that the server hangs: it sends a comment every 10 s while it works.
_SILENCE_SECONDS = 60.0


class ChatError(Exception):
    """The server refused the request or ended the stream with an error."""


@dataclass(slots=True)
class Meter:
    """Tokens and times of one answer, fed chunk by chunk."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    finish: str = ""

    def feed(self, chunk: dict[str, Any]) -> str:
        """Count one chunk; returns the text in it (reasoning included)."""
        usage = chunk.get("usage")
        choices = chunk.get("choices") or []
        delta = choices[0].get("delta", {}) if choices else {}
        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if choices:
            self.finish = choices[0].get("finish_reason") or self.finish
        before = self.tokens
        if usage:
            self.tokens = usage["completion_tokens"]
            self.prompt_tokens = usage["prompt_tokens"]
        elif text:  # a server that sends no usage with each chunk: about one token a chunk
            self.tokens += 1
        if choices and self.tokens > before:
            self.last = time.perf_counter()
            if self.first is None:
                self.first, self.first_tokens = self.last, self.tokens
        return text

    @property
    def first_token_ms(self) -> float:
        """Milliseconds from sending the request to the first token."""
        return ((self.first or self.started) - self.started) * 1e3

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: the tokens after the first chunk over the time since it."""
        seconds = self.last - (self.first or self.last)
        return (self.tokens - self.first_tokens) / seconds if seconds > 0 else 0.0


def chat_body(prompt: str, max_tokens: int, **extra: object) -> dict[str, object]:
    """A streamed request for a direct answer, with running token counts."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "thinking": {"type": "disabled"},
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **extra,
    }


def model_name(url: str) -> str:
    """The name of the first model that the server offers.

    Raises:
        ChatError: when the list cannot be read.
        ServerError: when nobody answers.
    """
    status, body = get(url, "/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ChatError(f"{url}/v1/models answered {status} and names no model") from error


def stream_chat(url: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
    """The chunks of one answer, as they come.

    Raises:
        ChatError: when the server refuses, reports an error, or breaks the stream off.
        ServerError: when nobody answers.
    """
    connection = connect(url, _SILENCE_SECONDS)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise ChatError(f"{response.status}: {_message(response.read())}")
        yield from _events(response)
    except TimeoutError as error:
        raise ChatError(f"the stream was silent for {_SILENCE_SECONDS:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"the connection to {url} broke ({error!r})") from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        kind, _, data = line.decode().rstrip("\r\n").partition(":")
        if kind != "data":
            continue  # a comment that keeps the connection alive, or the blank line after an event
        data = data.strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatError(_message(data.encode()))
        yield chunk
    raise ChatError("the server closed the stream before its end")


def _message(body: bytes) -> str:
    """The message of an OpenAI error body, else the start of whatever came."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:300] or "no message"
