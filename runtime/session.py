"""One conversation on the device: its slot, how far it has been processed, and how its next token
is chosen.

Everything that a rollback must undo is a number here; the tensors are addressed by position.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ultraflash.runtime.request import Generation
from ultraflash.runtime.step_io import Draw, Part


@dataclass(slots=True)
class Session:
    """A request at work. `done` positions of its slot are processed; `ids[done:]` are not."""

    key: str
    request: Generation
    slot: int
    eos: int
    max_seq: int
    ids: list[int]
    seed: int
    done: int = 0
    steps: int = 0  # decode steps run, part of the random counter
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
        """Positions that are known but not processed: the rest of the prompt, or the token sampled
        last."""
        return len(self.ids) - self.done

    def part(self, rows: int) -> Part:
        """The next `rows` unprocessed positions as rows of a step."""
        ids = self.ids[self.done : self.done + rows]
        how = self.request.sampling
        ban_eos = self.request.ignore_eos or self.generated < self.request.min_tokens
        draw = Draw(
            how.temperature,
            how.top_p,
            how.top_k,
            self.seed,
            self.steps,
            self.eos if ban_eos else -1,
        )
        return Part(self.slot, self.done, ids, draw)

    def accept(self, token: int) -> str | None:
        """Take the token sampled behind the last position; the reason to stop, if there is one.

        Neither EOS nor a stop id is kept. With `ignore_eos`, EOS is banned while sampling, so only
        other stop ids can come.
        """
        if token == self.eos or token in self.request.stop_ids:
            return "stop"
        self.ids.append(token)
        if self.generated >= self.request.max_tokens or len(self.ids) >= self.max_seq:
            return "length"
        return None
