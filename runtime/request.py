"""What the engine is asked for and what it answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.runtime.errors import RequestError

# What the io buffers hold: f32, i32, u64 (graphs/io.py).
_MAX_TEMPERATURE, _MAX_TOP_K, _MAX_SEED = 3.4e38, 2**31 - 1, 2**64 - 1


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
    """A prompt to continue. EOS and `stop_ids` end the answer; EOS cannot come before
    `min_tokens`, nor at all with `ignore_eos`. Only requests of equal `salt` share what was
    computed."""

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    images: tuple[ImageSpan, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What one unit of work did for one request.

    `rows` of a decode step were its own: the token before and the drafts verified. `tokens` never
    holds a stop id; a finished step may have none. `finish` is None, "stop" or "length".
    """

    key: str
    tokens: tuple[int, ...]
    finish: str | None
    prompt_tokens: int
    cached_tokens: int
    prefill_ms: float
    decode_ms: float
    rows: int = 0


def check_request(request: Generation, max_seq: int, vocab: int) -> None:
    """Refuse what can never run on a model of `vocab` ids with room for `max_seq` tokens.

    Raises:
        RequestError: naming the field, its value, the limit and the remedy.
    """
    count = len(request.ids)
    if not count:
        raise RequestError("ids", "the prompt is empty: send at least one token")
    if count >= max_seq:
        raise RequestError(
            "ids",
            f"the prompt has {count} tokens, maximum context length is {max_seq} "
            f"tokens: shorten it to {max_seq - 1} at most",
        )
    if request.images:
        raise RequestError("images", "this engine has no vision yet: send text only")
    bad = next((i for i in request.ids if not 0 <= i < vocab), None)
    if bad is not None:
        raise RequestError(
            "ids", f"token id {bad} is outside the vocabulary: use ids of 0 to {vocab - 1}"
        )
    if request.max_tokens < 1:
        raise RequestError("max_tokens", f"max_tokens must be at least 1, got {request.max_tokens}")
    how = request.sampling
    if not 0 <= how.temperature <= _MAX_TEMPERATURE:  # NaN fails as well
        raise RequestError(
            "temperature", f"temperature must be at least 0 and finite, got {how.temperature}"
        )
    if not 0 < how.top_p <= 1:
        raise RequestError("top_p", f"top_p must be above 0 and at most 1, got {how.top_p}")
    if not 0 <= how.top_k <= _MAX_TOP_K:
        raise RequestError("top_k", f"top_k must be 0 (off) to {_MAX_TOP_K}, got {how.top_k}")
    if how.seed is not None and not 0 <= how.seed <= _MAX_SEED:
        raise RequestError("seed", f"seed must be 0 to {_MAX_SEED}, got {how.seed}")
