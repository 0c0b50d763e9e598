"""One conversation on the device: its slot, how far it has been processed, and what it tries next.

Everything that a rollback must undo is a number here; the tensors are addressed by position.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ultraflash.graphs.width import room
from ultraflash.runtime.backend import Backend, Bytes, Staged
from ultraflash.runtime.plans import Result
from ultraflash.runtime.request import Generation
from ultraflash.runtime.resume import ALL_LAYERS, Kind, Run
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.step_io import Draw, Part


@dataclass(slots=True)
class Session:
    """A request at work.

    `done` positions of its slot are processed; `ids[done:]` are not. While decoding exactly one is
    not: the token sampled last, behind which `drafts` are proposed. When a stop id ended the answer
    inside accepted drafts, more are processed than count.
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
    run: Run = ALL_LAYERS  # how the prompt is processed
    answering: bool = False  # the prompt is processed, a token was sampled

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
    def known(self) -> int:
        """Positions that are processed and count."""
        return min(self.done, len(self.ids))

    @property
    def repeatable(self) -> bool:
        """Seeded and random: the same seed must give the same widths, whatever runs beside it."""
        how = self.request.sampling
        return how.seed is not None and how.temperature > 0

    @property
    def room(self) -> int:
        """Drafts that could still become tokens before max_tokens or the context end the answer."""
        return int(room(len(self.ids), self.end, len(self.drafts)))

    @property
    def end(self) -> int:
        """Tokens, prompt included, with which the answer ends at the latest."""
        return min(self.prompt_tokens + self.request.max_tokens, self.max_seq)

    @property
    def goes_on(self) -> bool:
        """Whether another step will come behind the next one unless that one gives a stop id."""
        return self.end - len(self.ids) > 1 + self.room

    def chunk(self, rows: int) -> Part:
        """The next `rows` positions of the prompt as rows of a prefill."""
        return self._prompt_part(self.done, self.done + rows)

    def tail(self, rows: int) -> Part:
        """The last `rows` positions of the prompt, processed or not, as rows of a replay."""
        return self._prompt_part(self.prompt_tokens - rows, self.prompt_tokens)

    def verify(self, drafts: int | None = None) -> Part:
        """The token sampled last and proposals (all by default) as rows of a decode step."""
        ids = [*self.ids[self.done :], *self.drafts[:drafts]]
        # The prefill, which drew the drafts, was step 0: no number may be drawn twice.
        part = self._part(self.done, ids, self.steps + 1)
        return part._replace(end=self.end, confidence=self.confidence)

    def advance(self, result: Result) -> None:
        """A decode step has been run."""
        self.done += 1 + result.accepted
        self.steps += 1

    def take(self, result: Result) -> tuple[tuple[int, ...], str | None]:
        """What a step gave, and what it proposes next; the tokens that count, and the reason to
        stop if there is one.
        """
        given = self.emit([*self.drafts[: result.accepted], result.token])
        self.drafts, self.confidence = result.drafts, result.confidence
        return given

    def emit(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
        """Take what a step gave; the tokens that count, and the reason to stop if there is one.

        A stop id is not kept, nor anything behind it.
        """
        stops = self.request.stop_ids | {self.eos}
        kept: list[int] = []
        for token in tokens:
            if token in stops:
                return tuple(kept), "stop"
            kept.append(token)
            self.ids.append(token)
            if len(self.ids) >= self.end:
                return tuple(kept), "length"
        return tuple(kept), None

    def stage(
        self,
        layout: Layout,
        backend: Backend,
        length: int,
        kind: Kind,
        ranges: Sequence[tuple[int, int]],
    ) -> tuple[Staged, list[Staged]]:
        """Begin to bring out the restore point at `length`, and the global KV of some ranges of
        positions.
        """
        parts = [layout.point(length, kind), *(layout.segment(*span) for span in ranges)]
        point, *segments = backend.stage(self.slot, parts)
        return point, segments

    def restore(
        self, layout: Layout, backend: Backend, length: int, point: Bytes, segments: Sequence[Bytes]
    ) -> None:
        """Begin behind `length` tokens that were processed before, maybe elsewhere.

        Raises:
            SnapshotError: when the bytes do not fit this engine or this length; nothing has
                changed then.
        """
        layout.restore(backend, self.slot, length, point, segments)
        self.done = self.cached = length

    def _prompt_part(self, start: int, end: int) -> Part:
        return self._part(start, self.ids[start:end], step=0)

    def _part(self, start: int, ids: Sequence[int], step: int) -> Part:
        how = self.request.sampling
        draw = Draw(how.temperature, how.top_p, how.top_k, self.seed, step)
        # The token behind the prompt's last position is the answer's first one.
        enough = self.prompt_tokens - 1 + self.request.min_tokens
        ban_end = self.max_seq if self.request.ignore_eos else min(enough, self.max_seq)
        return Part(self.slot, start, ids, draw, self.eos, ban_end)
