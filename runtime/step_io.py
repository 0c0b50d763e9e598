"""Fills a plan's io buffers before a step (graphs/io.py says what each means)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ultraflash.graphs.width import Rule, room
from ultraflash.runtime.backend import Array, Runner

NO_SEQUENCE = -1  # slot of a row that belongs to nobody


class Draw(NamedTuple):
    """How tokens behind a part's rows are chosen."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    step: int = 0
    want_logprobs: bool = False


class Part(NamedTuple):
    """One sequence's rows in a step.

    `ids` stand at positions `start`, `start + 1`, ... of `slot`. The token `banned` may not come
    behind those at positions before `ban_end`. Windows reach back to `window_start` at most. Where
    drafts are among the ids: their confidences, and with how many tokens, prompt included, the
    sequence ends.
    """

    slot: int
    start: int
    ids: Sequence[int]
    draw: Draw = Draw()
    banned: int = -1
    ban_end: int = 0
    window_start: int = 0
    end: int = 0
    confidence: Sequence[float] = ()

    @property
    def room(self) -> int:
        """Drafts among its ids that could become tokens."""
        return int(room(self.start + 1, self.end, len(self.ids) - 1))


class Desk:
    """The io of one runner. Where every sequence goes on as in the runner's last step, the host
    writes the numbers of the width rule: the rest is on the device.
    """

    def __init__(self, runner: Runner) -> None:
        """Nothing is known of what stands in it."""
        self._runner = runner
        self._layout: list[object] | None = None

    @property
    def repeats(self) -> bool:
        """Whether another run now would be the next step of the same sequences."""
        return self._layout is not None

    def holds(self, parts: Sequence[Part]) -> bool:
        """Whether these parts, which follow, are that step."""
        return self._layout == [_layout(part) for part in parts]

    def write(self, parts: Sequence[Part]) -> None:
        """Lay the parts out for the next run."""
        write_step(self._runner, parts)
        self._layout = None

    def follow(self, parts: Sequence[Part], rule: Rule) -> None:
        """The next run continues the parts' slots as far as `rule` lets it."""
        if not self.holds(parts):
            write_follow(self._runner, parts)
            self._layout = [_layout(part) for part in parts]
        self.decide(rule, 0)

    def decide(self, rule: Rule, place: int) -> None:
        """Numbers for the next launch to `place`."""
        for name, value in rule._asdict().items():
            cut = value[: self._runner.plan.rows] if name == "price" else value
            _write(self._runner, name, cut, place)


def _layout(part: Part) -> object:
    """What the host has to say of a part that follows: not where, which ids and which step."""
    slot, _, _, draw, banned, ban_end, window_start, end, _ = part
    return slot, draw[:4], draw[5], banned, ban_end, window_start, end


def write_step(runner: Runner, parts: Sequence[Part]) -> None:
    """Lay the parts out row by row; rows and sequences that the plan has beyond them stay idle."""
    rows, sequences = runner.plan.rows, runner.plan.sequences
    io = {name: np.zeros(rows, np.int32) for name in ("ids", "position", "window_start")}
    io |= {name: np.full(rows, -1, np.int32) for name in ("slot", "banned")}
    row_start = np.zeros(sequences + 1, np.int32)
    at = 0
    for number, part in enumerate(parts):
        end = at + len(part.ids)
        io["ids"][at:end], io["slot"][at:end] = part.ids, part.slot
        io["position"][at:end] = np.arange(part.start, part.start + len(part.ids))
        io["window_start"][at:end] = part.window_start
        io["banned"][at : max(at, min(at + part.ban_end - part.start, end))] = part.banned
        row_start[number + 1 :] = at = end
    follows = np.full(sequences, -1, np.int32)
    for name, value in (io | {"row_start": row_start, "follows": follows}).items():
        _write(runner, name, value)
    if "io.token" in runner.plan.buffers:
        _write_draws(runner, parts)


def write_follow(runner: Runner, parts: Sequence[Part]) -> None:
    """What `FollowRows` needs to lay the parts' next steps out, one after the other: as many parts
    as the plan has sequences.
    """
    columns = {
        "follows": [p.slot for p in parts],
        "end": [p.end for p in parts],
        "ban": [p.banned for p in parts],
        "ban_end": [p.ban_end for p in parts],
        "window_start": [0] * runner.plan.rows,
    }
    for name, values in columns.items():
        _write(runner, name, np.array(values, np.int32))
    _write_draws(runner, parts)


def _write(runner: Runner, name: str, value: Array, place: int | None = None) -> None:
    # A plan has only the io buffers that its nodes use: a part of a prompt draws no token.
    if f"io.{name}" in runner.plan.buffers:
        runner.write(f"io.{name}", value, place)


def write_constants(runner: Runner) -> None:
    """What a step without constraints never changes: everything allowed, no bias, no image."""
    fill = {
        "mask": (0xFFFFFFFF, np.uint32),
        "bias_ids": (-1, np.int32),
        "bias": (0, np.float32),
        "is_image": (0, np.int32),
    }
    for name, (value, dtype) in fill.items():
        if ref := runner.plan.buffers.get(f"io.{name}"):
            runner.write(ref.name, np.full(ref.shape, value, dtype))


_DRAW_TYPES = {
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int32,
    "seed": np.uint64,
    "step": np.int32,
    "want_logprobs": np.int32,
}


def _write_draws(runner: Runner, parts: Sequence[Part]) -> None:
    draws = [p.draw for p in parts] + [Draw()] * (runner.plan.sequences - len(parts))
    for name, dtype in _DRAW_TYPES.items():
        runner.write(f"io.{name}", np.array([getattr(d, name) for d in draws], dtype))
