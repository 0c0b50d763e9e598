"""What the engine is asked for and what it answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 are off; `seed` None
    draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where a picture stands in a prompt, and which one it is (`content.image_digest`)."""

    start: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt to continue. `stop_ids` None means the model's EOS; EOS cannot come before
    `min_tokens`. Only requests of equal `salt` share what was computed."""

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    images: tuple[ImageSpan, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What one unit of work did for one request.

    `tokens` never holds a stop id; a finished step may have none. `finish` is None, "stop" or
    "length".
    """

    key: str
    tokens: tuple[int, ...]
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    prefill_ms: float
    decode_ms: float
