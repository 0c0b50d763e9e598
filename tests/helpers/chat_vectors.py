"""The chat encoding vectors, as cases for tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "tiny-a"


@cache
def _vectors() -> dict[str, Any]:
    vectors: dict[str, Any] = json.loads((GOLDEN / "chat_encoding.json").read_text("utf-8"))
    return vectors


def rendered() -> list[dict[str, Any]]:
    """Requests and the prompts they give."""
    return list(_vectors()["render"])


def parsed() -> list[dict[str, Any]]:
    """Outputs of the model and the messages they are."""
    return list(_vectors()["parse"]["text"])


def parsed_pieces() -> list[dict[str, Any]]:
    """Outputs in pieces that are tokenized alone."""
    return list(_vectors()["parse"]["pieces"])


def rejected() -> list[dict[str, Any]]:
    """Requests that get 400 (404 for the unknown model)."""
    return list(_vectors()["reject"])


def prompts_as_ids() -> list[dict[str, Any]]:
    """Requests and their token ids with the tokenizer of `TINY`."""
    return list(json.loads((TINY / "expected" / "chat.json").read_text("utf-8"))["cases"])
