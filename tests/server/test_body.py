from __future__ import annotations

import io

import pytest

from ultraflash.server import body
from ultraflash.server.body import parse_object, read_body
from ultraflash.server.errors import RequestError


class Pausing(io.BytesIO):
    """A client that stops sending."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size) or self._pause()

    def _pause(self) -> bytes:
        raise TimeoutError("timed out")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": Infinity}', "not JSON"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": "\xff"}', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"x"', "not a string"),
        (b"null", "not null"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
        (b'{"a":' * 100_000, "deeper than 64"),
    ],
)
def test_what_is_no_body_is_refused_in_one_sentence(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_object(data)
    assert caught.value.status == 400
    assert len(caught.value.message) < 200


def test_the_last_of_duplicate_keys_wins_and_64_levels_are_fine() -> None:
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}
    parse_object(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}")


def test_a_body_is_read_whole_with_and_without_a_length() -> None:
    assert read_body(io.BytesIO(b"abc"), 3) == b"abc"
    assert read_body(io.BytesIO(b"abc"), None) == b"abc"


def test_too_large_is_refused_before_and_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 10)
    for length in (11, None):
        with pytest.raises(RequestError, match="too large") as caught:
            read_body(io.BytesIO(b"x" * 11), length)
        assert caught.value.status == 413


def test_a_body_that_stops_or_ends_early_is_refused() -> None:
    with pytest.raises(RequestError, match="after 3 bytes") as caught:
        read_body(Pausing(b"abc"), 9)
    assert caught.value.status == 408
    with pytest.raises(RequestError, match="has 3 bytes where Content-Length says 9"):
        read_body(io.BytesIO(b"abc"), 9)
