"""Pieces of an answer -> the lines of a server-sent event stream in OpenAI's shape.

One event a piece with a fixed head and tail around it; nothing but the piece itself is encoded
again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ultraflash.server.errors import Problem
from ultraflash.server.protocol import Piece

CONTENT_TYPE = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode
Usage = Callable[[], dict[str, Any]]


class ChunkWriter:
    """Writes the chunks of one streamed chat completion.

    `include_usage`: one more chunk at the end with `choices: []` and the usage, and `usage: null`
    on the others; `usage_in_each`: running counts on all of them instead of null.
    """

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        fingerprint: str,
        *,
        include_usage: bool,
        usage_in_each: bool,
    ) -> None:
        """What all chunks share."""
        shared = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + _encode(shared)[:-1] + b',"choices":['
        self._include_usage, self._usage_in_each = include_usage, usage_in_each

    def pieces(self, pieces: list[Piece], usage: Usage) -> bytes:
        """The events of these pieces."""
        if not pieces:
            return b""
        tail = b"]}\n\n"
        if self._usage_in_each:
            tail = b'],"usage":' + _encode(usage()) + b"}\n\n"
        elif self._include_usage:
            tail = b'],"usage":null}\n\n'
        return b"".join([self._piece(piece) + tail for piece in pieces])

    def end(self, usage: Usage) -> bytes:
        """The usage chunk, if asked for, and the mark that ends the stream."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage()) + b"}\n\n" + DONE

    def _piece(self, piece: Piece) -> bytes:
        reason = b"null" if piece.finish_reason is None else _encode(piece.finish_reason)
        middle = b',"logprobs":null,"finish_reason":' + reason + b"}"
        return self._head + b'{"index":0,"delta":' + bytes(piece.delta) + middle


def error_event(problem: Problem) -> bytes:
    """The event that ends a stream which cannot go on; no `[DONE]` follows it."""
    return b"data: " + problem.body() + b"\n\n"
