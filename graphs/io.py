"""What the host and a step tell each other: the io buffers (architecture.md section 3).

Everything that changes between steps stands here, never in a kernel argument, so that a captured
graph is never updated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.sample import TOP_LOGPROBS
from ultraflash.graphs.plan import PlanBuilder, Ref

MAX_BIASES = 512  # entries of a request's logit bias


@dataclass(frozen=True)
class Io:
    """One step's inputs and its result. T rows, S sequences, V vocabulary, B bias entries."""

    ids: Ref  # [T] i32 token ids
    is_image: Ref  # [T] i32 1 inside an image
    position: Ref  # [T] i32, absolute; 0 in idle rows
    slot: Ref  # [T] i32, -1 in idle rows
    row_start: Ref  # [S+1] i32
    temperature: Ref  # [S] f32
    top_p: Ref  # [S] f32
    top_k: Ref  # [S] i32, 0 = off
    seed: Ref  # [S] u64
    next_position: Ref  # [S] i32: position of the token to be sampled
    step: Ref  # [S] i32: decode steps that the request has run
    mask: Ref  # [T, ceil(V/32)] u32, one bit a token, all ones by default
    bias_ids: Ref  # [S, B] i32, -1 = unused
    bias: Ref  # [S, B] f32
    banned: Ref  # [S] i32: a token that may not come (EOS before min_tokens), or -1
    want_logprobs: Ref  # [S] i32
    token: Ref  # [S] i32 result
    logprob: Ref  # [S] f32 result
    top_ids: Ref  # [S, 20] i32 result
    top_logprobs: Ref  # [S, 20] f32 result


def io_buffers(b: PlanBuilder, model: Model) -> Io:
    """The io buffers of a plan of `b.rows` rows and `b.sequences` sequences."""
    t, s, words = b.rows, b.sequences, -(-model.vocab // 32)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "ids": ((t,), "i32"),
        "is_image": ((t,), "i32"),
        "position": ((t,), "i32"),
        "slot": ((t,), "i32"),
        "row_start": ((s + 1,), "i32"),
        "temperature": ((s,), "f32"),
        "top_p": ((s,), "f32"),
        "top_k": ((s,), "i32"),
        "seed": ((s,), "u64"),
        "next_position": ((s,), "i32"),
        "step": ((s,), "i32"),
        "mask": ((t, words), "u32"),
        "bias_ids": ((s, MAX_BIASES), "i32"),
        "bias": ((s, MAX_BIASES), "f32"),
        "banned": ((s,), "i32"),
        "want_logprobs": ((s,), "i32"),
        "token": ((s,), "i32"),
        "logprob": ((s,), "f32"),
        "top_ids": ((s, TOP_LOGPROBS), "i32"),
        "top_logprobs": ((s, TOP_LOGPROBS), "f32"),
    }
    return Io(**{f.name: b.io(f"io.{f.name}", *shapes[f.name]) for f in fields(Io)})
