"""Typed access to the fields of a JSON object; null means absent.

Each function raises `RequestError` naming the field, its limits and the value (numbers only: text
of a client is never repeated).
"""

from __future__ import annotations

from typing import Any

from ultraflash.server.body import json_type
from ultraflash.server.errors import RequestError


def integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """An integer from `least` to `most`; 1.0 is none."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise RequestError(name, f"{name} must be an integer, not {json_type(value)}")
    return None if value is None else _within(name, value, least, most)


def number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    """A number from `least` to `most`."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise RequestError(name, f"{name} must be a number, not {json_type(value)}")
    return None if value is None else float(_within(name, value, least, most))


def boolean(body: dict[str, Any], name: str, prefix: str = "") -> bool:
    """true or false; absent is false. `prefix` leads to the object that holds the field."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        field = prefix + name
        raise RequestError(field, f"{field} must be a boolean, not {json_type(value)}")
    return bool(value)


def string(body: dict[str, Any], name: str) -> str | None:
    """A string."""
    value: str | None = _typed(body, name, str, "a string")
    return value


def array(body: dict[str, Any], name: str) -> list[Any] | None:
    """An array of anything."""
    value: list[Any] | None = _typed(body, name, list, "an array")
    return value


def mapping(body: dict[str, Any], name: str) -> dict[str, Any] | None:
    """An object."""
    value: dict[str, Any] | None = _typed(body, name, dict, "an object")
    return value


def _typed(body: dict[str, Any], name: str, kind: type, words: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError(name, f"{name} must be {words}, not {json_type(value)}")
    return value


def _within(name: str, value: Any, least: float, most: float) -> Any:
    if least <= value <= most:
        return value
    got = f"got {value}" if abs(value) < 10**15 else "got a number far outside"
    raise RequestError(name, f"{name} must be from {least} to {most}, {got}")
