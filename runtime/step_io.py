"""Fills a plan's io buffers before a step (graphs/io.py says what each means)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraflash.runtime.backend import Runner

NO_SEQUENCE = -1  # slot of a row that belongs to nobody


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token behind a part's last row is chosen."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    step: int = 0
    banned: int = -1
    want_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a step: `ids` stand at positions `start`, `start + 1`, ... of
    `slot`."""

    slot: int
    start: int
    ids: Sequence[int]
    draw: Draw = Draw()


def write_step(runner: Runner, parts: Sequence[Part]) -> None:
    """Lay the parts out row by row; rows and sequences that the plan has beyond them stay idle."""
    rows, sequences = runner.plan.rows, runner.plan.sequences
    ids, position = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    slot = np.full(rows, NO_SEQUENCE, np.int32)
    row_start = np.zeros(sequences + 1, np.int32)
    at = 0
    for number, part in enumerate(parts):
        end = at + len(part.ids)
        ids[at:end], slot[at:end] = part.ids, part.slot
        position[at:end] = np.arange(part.start, part.start + len(part.ids))
        row_start[number + 1 :] = at = end
    for name, value in (
        ("ids", ids),
        ("position", position),
        ("slot", slot),
        ("row_start", row_start),
    ):
        runner.write(f"io.{name}", value)
    _write_draws(runner, parts)


def write_constants(runner: Runner) -> None:
    """What a step without constraints never changes: everything allowed, no bias, no image."""
    fill = {
        "mask": (0xFFFFFFFF, np.uint32),
        "bias_ids": (-1, np.int32),
        "bias": (0, np.float32),
        "is_image": (0, np.int32),
    }
    for name, (value, dtype) in fill.items():
        runner.write(f"io.{name}", np.full(runner.plan.buffers[f"io.{name}"].shape, value, dtype))


def _write_draws(runner: Runner, parts: Sequence[Part]) -> None:
    draws = [p.draw for p in parts] + [Draw()] * (runner.plan.sequences - len(parts))
    next_position = np.zeros(len(draws), np.int32)
    next_position[: len(parts)] = [p.start + len(p.ids) for p in parts]
    runner.write("io.next_position", next_position)
    for name, dtype in (
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("seed", np.uint64),
        ("step", np.int32),
        ("banned", np.int32),
        ("want_logprobs", np.int32),
    ):
        runner.write(f"io.{name}", np.array([getattr(d, name) for d in draws], dtype))
