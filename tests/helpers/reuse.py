"""Conversations with an engine that has a store: requests, what came of them, rendered turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.points import ASSISTANT, EOS, USER
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling, Step
from ultraflash.runtime.store import LocalStore, Role

BOS, SYSTEM, THINK, THINK_END = 0, 486, 493, 494
EVERY = 32  # tokens of a segment
OFTEN = frozenset(range(3, 480, 4))  # stop ids that come soon
GREEDY = Sampling(0.0)


def open_engine(folder: Path, backend: str, **settings: Any) -> Engine:
    # Fixed widths: what is proposed, and so compared, must not depend on measured times.
    defaults = {"max_seq": 512, "max_sequences": 3, "segment_tokens": EVERY, "width": "all"}
    return Engine.open(RuntimeConfig(cache_dir=folder, backend=backend, **{**defaults, **settings}))


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    drafts: list[tuple[int, ...]] = field(default_factory=list)  # all proposals, in order
    last: Step | None = None

    @property
    def cached(self) -> int:
        assert self.last is not None
        return self.last.cached_tokens

    @property
    def finish(self) -> str:
        assert self.last is not None
        return str(self.last.finish)

    @property
    def said(self) -> tuple[Any, ...]:
        """Everything that reuse must not change."""
        assert self.last is not None
        return self.tokens, self.drafts, self.finish, self.last.prompt_tokens


def run(engine: Engine, *requests: Generation) -> list[Answer]:
    """The answers of requests that run side by side."""
    answers = {str(number): Answer() for number in range(len(requests))}
    for key, request in zip(answers, requests, strict=True):
        engine._queue.append((key, request))  # past the door, which refuses pictures
    while engine.has_work:
        steps = engine.step()
        proposals = {s.key: tuple(s.drafts) for s in engine._live() if s.answering}
        for step in steps:
            answer = answers[step.key]
            answer.tokens += step.tokens
            answer.last = step
            if step.key in proposals:
                answer.drafts.append(proposals[step.key])
    return list(answers.values())


def ask(engine: Engine, ids: Sequence[int], max_tokens: int = 6, **how: Any) -> Answer:
    how = {"sampling": GREEDY, **how}
    return run(engine, Generation(tuple(ids), max_tokens, **how))[0]


def without_store(engine: Engine, ids: Sequence[int], max_tokens: int = 6, **how: Any) -> Answer:
    kept = engine.store
    engine.use_store(None)
    try:
        answer = ask(engine, ids, max_tokens, **how)
    finally:
        engine.use_store(kept)
    assert answer.cached == 0
    return answer


def lengths(engine: Engine, role: Role) -> list[int]:
    engine._reuse.settle(10)  # a device takes a moment
    store = engine.store
    assert isinstance(store, LocalStore)
    points = [entry.point for entry in store._entries.values()]
    return sorted(point.length for point in points if role in point.role)


# --- a conversation, rendered as the model's template does ---


@dataclass
class Turn:
    user: list[int]
    thinking: bool
    reasoning: list[int] = field(default_factory=list)
    content: list[int] = field(default_factory=list)


def render(turns: Sequence[Turn], tools: bool, system: Sequence[int] = ()) -> list[int]:
    """With tools all reasoning stays in the prompt; without, that of earlier turns is dropped."""
    ids = [BOS, SYSTEM, *system]
    for number, turn in enumerate(turns):
        ids += [USER, *turn.user, ASSISTANT]
        last = number == len(turns) - 1
        ids.append(THINK if turn.thinking and (last or tools) else THINK_END)
        if not last:
            kept = [*turn.reasoning, THINK_END] if turn.thinking and tools else []
            ids += [*kept, *turn.content, EOS]
    return ids


def end_turn(turn: Turn, answer: Answer) -> None:
    """What the client keeps of an answer: reasoning and content, if the model thought."""
    half = len(answer.tokens) // 2 if turn.thinking else 0
    turn.reasoning, turn.content = answer.tokens[:half], answer.tokens[half:]
