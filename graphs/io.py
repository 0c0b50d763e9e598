"""What the host and a step tell each other: the io buffers (architecture.md section 3).

Everything that changes between steps stands here, never in a kernel argument, so that a captured
graph is never updated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import PlanBuilder, Ref
from ultraflash.graphs.sampling import TOP_LOGPROBS
from ultraflash.graphs.width import KNOTS

MAX_BIASES = 512  # entries of a request's logit bias
# The record: what a step says. Everything else the host writes.
RESULTS = tuple(
    f"io.{name}"
    for name in (
        "kept", "token", "accepted", "drafts", "confidence", "logprob", "top_ids", "top_logprobs",
    )
)  # fmt: skip
# Hardly ever written, and large: nothing that every step has to bring to the device.
RARE = tuple(f"io.{name}" for name in ("mask", "bias_ids", "bias", "is_image"))


@dataclass(frozen=True)
class Io:
    """One step's inputs and its result. T rows, S sequences, V vocabulary, B bias entries, D drafts
    a sequence.
    """

    ids: Ref  # [T] i32 token ids
    is_image: Ref  # [T] i32 1 inside an image
    position: Ref  # [T] i32, absolute; 0 in idle rows
    slot: Ref  # [T] i32, -1 in idle rows
    row_start: Ref  # [S+1] i32
    # Decode only: what a step needs that the device lays out itself (ops/follow_rows.py).
    follows: Ref  # [S] i32 slots of the sequences that go on from their last step; -1: host's rows
    end: Ref  # [S] i32: tokens, prompt included, with which an answer ends at the latest
    ban: Ref  # [S] i32: what `banned` holds at positions before ban_end
    ban_end: Ref  # [S] i32
    own: Ref  # [S] i32, and the next three: numbers of the width rule (width.py)
    threshold: Ref  # [D] f32
    chance: Ref  # [2, D, K] f32
    price: Ref  # [T] f32
    window_start: Ref  # [T] i32: the first position a row's window may reach; 0 but in a replay
    temperature: Ref  # [S] f32
    top_p: Ref  # [S] f32
    top_k: Ref  # [S] i32, 0 = off
    seed: Ref  # [S] u64
    step: Ref  # [S] i32: decode steps that the request has run
    mask: Ref  # [T, ceil(V/32)] u32, one bit a token, all ones by default
    bias_ids: Ref  # [S, B] i32, -1 = unused
    bias: Ref  # [S, B] f32
    banned: Ref  # [T] i32: a token that may not come behind a row (EOS before min_tokens), or -1
    want_logprobs: Ref  # [S] i32
    kept: Ref  # [S] i32 result: drafts among the rows (decode only)
    token: Ref  # [S] i32 result
    accepted: Ref  # [S] i32 result: drafts that stay
    drafts: Ref  # [S, D] i32 result: the next block
    confidence: Ref  # [S, D] f32 result, before the sigmoid
    logprob: Ref  # [T] f32 result, of the token emitted behind each row; [S] in a prefill
    top_ids: Ref  # [T, 20] i32 result
    top_logprobs: Ref  # [T, 20] f32 result


def io_buffers(b: PlanBuilder, model: Model, block: int, sampled_rows: int) -> Io:
    """The io buffers of a plan of `b.rows` rows and `b.sequences` sequences.

    `block` rows are drafted for each sequence; tokens are emitted behind `sampled_rows` rows, if
    any.
    """
    t, s, words = b.rows, b.sequences, -(-model.vocab // 32)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "ids": ((t,), "i32"),
        "is_image": ((t,), "i32"),
        "position": ((t,), "i32"),
        "slot": ((t,), "i32"),
        "row_start": ((s + 1,), "i32"),
        "follows": ((s,), "i32"),
        "end": ((s,), "i32"),
        "ban": ((s,), "i32"),
        "ban_end": ((s,), "i32"),
        "own": ((s,), "i32"),
        "threshold": ((block,), "f32"),
        "chance": ((2, block, len(KNOTS)), "f32"),
        "price": ((t,), "f32"),
        "window_start": ((t,), "i32"),
        "temperature": ((s,), "f32"),
        "top_p": ((s,), "f32"),
        "top_k": ((s,), "i32"),
        "seed": ((s,), "u64"),
        "step": ((s,), "i32"),
        "mask": ((t, words), "u32"),
        "bias_ids": ((s, MAX_BIASES), "i32"),
        "bias": ((s, MAX_BIASES), "f32"),
        "banned": ((t,), "i32"),
        "want_logprobs": ((s,), "i32"),
        "kept": ((s,), "i32"),
        "token": ((s,), "i32"),
        "accepted": ((s,), "i32"),
        "drafts": ((s, block), "i32"),
        "confidence": ((s, block), "f32"),
        "logprob": ((sampled_rows,), "f32"),
        "top_ids": ((sampled_rows, TOP_LOGPROBS), "i32"),
        "top_logprobs": ((sampled_rows, TOP_LOGPROBS), "f32"),
    }
    return Io(**{f.name: b.io(f"io.{f.name}", *shapes[f.name]) for f in fields(Io)})
