"""One conversation on the device: its slot, how far it has been processed, and what it tries next.

Everything that a rollback must undo is a number here; the tensors are addressed by position.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ultraflash.runtime.request import Generation
from ultraflash.runtime.step_io import Draw, Part


@dataclass(slots=True)
class Session:
    """A request at work.

    `done` positions of its slot are processed; `ids[done:]` are not. While decoding exactly one is
    not: the token sampled last, behind which `drafts` are proposed.
    """

    key: str
    request: Generation
    slot: int
    eos: int
    max_seq: int
    ids: list[int]
    seed: int
    done: int = 0
    steps: int = 0  # decode steps run, part of the random counter; 0 is the prefill
    drafts: Sequence[int] = ()
    confidence: Sequence[float] = ()  # of the drafts, before the sigmoid
    cached: int = 0  # prompt tokens whose state came from a store
    prefill_ms: float = 0.0

    @classmethod
    def start(cls, key: str, request: Generation, slot: int, eos: int, max_seq: int) -> Session:
        """A session that has processed nothing yet."""
        seed = request.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        return cls(key, request, slot, eos, max_seq, list(request.ids), seed)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.ids)

    @property
    def generated(self) -> int:
        """Tokens produced so far."""
        return len(self.ids) - self.prompt_tokens

    @property
    def waiting(self) -> int:
        """Positions that are known but not processed: the rest of the prompt, or one token."""
        return len(self.ids) - self.done

    @property
    def room(self) -> int:
        """Drafts that could still become tokens before max_tokens or the context end the answer."""
        left = min(self.request.max_tokens - self.generated, self.max_seq - len(self.ids))
        return max(0, min(left - 1, len(self.drafts)))

    def chunk(self, rows: int) -> Part:
        """The next `rows` positions of the prompt as rows of a prefill."""
        return self._part(self.ids[self.done : self.done + rows])

    def verify(self, drafts: int) -> Part:
        """The token sampled last and `drafts` proposals as rows of a decode step."""
        return self._part([*self.ids[self.done :], *self.drafts[:drafts]])

    def emit(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
        """Take what a step gave; the tokens that count, and the reason to stop if there is one.

        A stop id is not kept, nor anything behind it.
        """
        stops = self.request.stop_ids
        stops = frozenset({self.eos}) if stops is None else stops
        kept: list[int] = []
        for token in tokens:
            if token in stops:
                return tuple(kept), "stop"
            kept.append(token)
            self.ids.append(token)
            if self.generated >= self.request.max_tokens or len(self.ids) >= self.max_seq:
                return tuple(kept), "length"
        return tuple(kept), None

    def _part(self, ids: Sequence[int]) -> Part:
        how = self.request.sampling
        draw = Draw(how.temperature, how.top_p, how.top_k, self.seed, self.steps)
        short = max(0, self.request.min_tokens - self.generated)
        num_banned = len(ids) if self.request.ignore_eos else short
        return Part(self.slot, self.done, ids, draw, self.eos, num_banned)
