"""Reads a request body: JSON whatever the content type says, and within limits.

Refused with one sentence each: more than 64 MiB, no UTF-8, NaN and Infinity, numbers out of range,
lone surrogates, nesting deeper than 64, anything but an object at the top. Of duplicate keys the
last one wins.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from gunicorn.http.errors import ParseException

from ultraflash.server.errors import RequestError

MAX_BODY_BYTES = 64 << 20
MAX_DEPTH = 64


class Readable(Protocol):
    """The part of a WSGI input stream that is used here."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; empty at the end."""


def read_body(stream: Readable, content_length: int | None) -> bytes:
    """All bytes of a body, chunked ones too (`content_length` None).

    Raises:
        RequestError: 413 beyond `MAX_BODY_BYTES`; 408 when the client stops sending; 400 when it
            ends early or its chunks are malformed.
    """
    if content_length is not None and content_length > MAX_BODY_BYTES:
        raise _too_large(f"{content_length} bytes")
    parts: list[bytes] = []
    size = 0
    try:
        while data := stream.read(1 << 20):
            parts.append(data)
            size += len(data)
            if size > MAX_BODY_BYTES:
                raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        text = f"the body stopped arriving after {size} bytes: send it without pauses"
        raise RequestError(None, text, status=408) from error
    except OSError as error:
        raise RequestError(None, f"the body ended after {size} bytes: send it whole") from error
    except ParseException as error:
        text = f"the body is not chunked as HTTP/1.1 says, after {size} bytes: mend its encoding"
        raise RequestError(None, text) from error
    if content_length is not None and size < content_length:
        text = (
            f"the body has {size} bytes where Content-Length says {content_length}: send it whole"
        )
        raise RequestError(None, text)
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` holds.

    Raises:
        RequestError: 400, saying what is wrong with it.
    """
    if not data:
        raise RequestError(None, "the body is empty: send a JSON object")
    try:
        value = msgspec.json.decode(data)
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:
        raise RequestError(None, f"the body is not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(None, f"the body must be a JSON object, not {json_type(value)}")
    _check_depth(value)
    return value


def json_type(value: object) -> str:
    """What JSON calls the type of `value`, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below = (v for c in level for v in (c.values() if isinstance(c, dict) else c))
        level = [v for v in below if isinstance(v, dict | list)]
        if not level:
            return
    raise _too_deep()


def too_slow(limit_s: float) -> RequestError:
    """What a client is told whose body was cut off after `limit_s` seconds."""
    text = f"the body did not arrive within {limit_s:g} s: send it faster, or less of it"
    return RequestError(None, text, status=408)


def _too_large(size: str) -> RequestError:
    text = f"the body is too large ({size}; at most {MAX_BODY_BYTES} bytes): send less"
    return RequestError(None, text, status=413)


def _too_deep() -> RequestError:
    return RequestError(None, f"the body is nested deeper than {MAX_DEPTH} levels: flatten it")
