"""The engine: prompts in, tokens out, one unit of work at a time.

`Engine.step` runs one decode step of everything that is running and one chunk of the prompt at the
head of the queue. It knows ids only: no text, no sockets, no clock but the one that measures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.ced import replay_start
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Backend
from ultraflash.runtime.backends import open_backend
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.content import Marks
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.fingerprint import fingerprint
from ultraflash.runtime.plans import Plans, Result
from ultraflash.runtime.profiles import DEFAULT_BLOCK, select_profile
from ultraflash.runtime.request import Generation, Step, check_request
from ultraflash.runtime.resume import Kind
from ultraflash.runtime.reuse import Reuse
from ultraflash.runtime.session import Session
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.speculate import Widths
from ultraflash.runtime.store import LocalStore, Store
from ultraflash.runtime.weights.index import CheckpointIndex, weights_digest
from ultraflash.runtime.weights.token_map import check_special_ids, turn_marks

Progress = Callable[[int, int], None]


class Engine:
    """One model, its plans, and the conversations on it. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        model: Model,
        backend: Backend,
        config: RuntimeConfig,
        checkpoint_digest: str,
        marks: Marks,
    ) -> None:
        """Use `open`."""
        self.model, self._config = model, config
        self.max_seq = config.max_seq or model.max_position
        # One slot more than decode at once, so that a prompt can prefill meanwhile.
        build = Build(
            model,
            Capacity(config.max_sequences + 1, self.max_seq),
            config.world,
            config.block(model),
            config.attention_weights == "bf16",
        )
        self._plans, self._drafting = Plans(build, backend, config), build.block > 0
        profile = select_profile(backend.arch, config.world, build.block or DEFAULT_BLOCK)
        self._widths = Widths(config.width, profile, config.max_rows, config.max_sequences)
        self._free = list(range(build.capacity.slots))
        self._queue: deque[tuple[str, Generation]] = deque()
        self._prefilling: Session | None = None
        self._ready: deque[Session] = deque()  # prefilled, waiting for a place among the running
        self._running: list[Session] = []
        plans = self._plans.representative()
        self.fingerprint = fingerprint(
            config, backend, checkpoint_digest, model, self.max_seq, plans
        )
        state = plans[0].of_life(Life.STATE)
        self._layout = Layout.of(model, state, replay_start(model, config.prefill))
        self._backend, self._marks = backend, marks
        self.use_store(None)

    @classmethod
    def open(cls, config: RuntimeConfig, progress: Progress | None = None) -> Engine:
        """Load a checkpoint and run one real step. `progress` receives (bytes done, bytes in all).

        Raises:
            EngineError: when the checkpoint, the settings or the machine do not allow it.
            GraphError: when the configuration or the world does not fit the model.
        """
        prepare_cache_dir(config)
        index = CheckpointIndex.open(config.checkpoint)
        model = Model.from_checkpoint(config.checkpoint)
        _check_context(config.max_seq, model)
        _check_tail(config, model)
        tokenizer = config.checkpoint / "tokenizer.json"
        check_special_ids(tokenizer, model)
        marks = turn_marks(tokenizer, model)
        backend = open_backend(config, index, model, progress)
        engine = cls(model, backend, config, weights_digest(index), marks)
        if backend.arch != "cpu":  # memory that is lacking shows now, not in somebody's answer
            engine._plans.prepare()
        engine._warm_up()
        engine.use_store(LocalStore(config.store_bytes) if config.store_bytes else None)
        return engine

    def use_store(self, store: Store | None) -> None:
        """Keep state between requests in `store`, None: nowhere.

        Requests whose prompts have begun are left alone and leave nothing.
        """
        self.store: Store | None = store
        self._reuse = Reuse(
            self._layout, self._backend, store, self.fingerprint, self._marks, self._config
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._queue or self._live() or self._reuse.busy)

    def submit(self, key: str, request: Generation) -> None:
        """Queue a request under a key that no live request has.

        Raises:
            RequestError: when it can never run.
        """
        check_request(request, self.max_seq, self.model.vocab)
        self._queue.append((key, request))

    def cancel(self, key: str) -> None:
        """Drop a request wherever it is; an unknown key is nothing to do."""
        self._queue = deque((k, r) for k, r in self._queue if k != key)
        for session in self._live():
            if session.key == key:
                self._reuse.finish(session)
                self._retire(session)

    def step(self) -> list[Step]:
        """One decode step of all running sequences, then one chunk of a prompt."""
        self._reuse.settle()
        return self._decode_once() + self._prefill_once()

    def close(self) -> None:
        """Forget all requests."""
        self._queue.clear()
        for session in self._live():
            self._retire(session)

    def _prefill_once(self) -> list[Step]:
        if self._prefilling is None and self._queue and self._free:
            self._begin(*self._queue.popleft())
        session = self._prefilling
        if session is None:
            return []
        started = time.perf_counter()
        result = self._prefill_part(session)
        session.prefill_ms += (time.perf_counter() - started) * 1e3
        if result is None:
            return []
        session.answering, self._prefilling = True, None
        self._ready.append(session)
        return [self._deliver(session, result, 0.0, 0)]

    def _begin(self, key: str, request: Generation) -> None:
        slot = self._free.pop(0)
        session = Session.start(key, request, slot, self.model.eos, self.max_seq)
        started = time.perf_counter()
        session.run = self._reuse.start(session)
        session.prefill_ms = (time.perf_counter() - started) * 1e3
        self._prefilling = session

    def _prefill_part(self, session: Session) -> Result | None:
        """A chunk of a prompt, or the replay that completes an encoded one."""
        part = session.chunk(self._reuse.room(session, self._config.prefill_chunks[-1]))
        if session.run.replay is None:
            result = self._plans.prefill(part, ends=len(part.ids) == session.waiting)
            session.done += len(part.ids)
            self._reuse.passed(session, Kind.FULL)  # a long prompt leaves points on its way
            return result
        if part.ids:
            self._plans.encode(part)
            session.done += len(part.ids)
            self._reuse.passed(session, Kind.ENCODER)
            return None
        return self._plans.replay(session.tail(session.run.replay))

    def _decode_once(self) -> list[Step]:
        while self._ready and len(self._running) < self._config.max_sequences:
            self._running.append(self._ready.popleft())
        if not self._running:
            return []
        started = time.perf_counter()
        sessions = list(self._running)
        rule, parts = self._widths.rule(sessions), [s.verify() for s in sessions]
        ahead = 0
        if self._repeats(sessions):
            ahead = self._widths.rows_ahead(sessions) if self._drafting else len(sessions)
        results = self._plans.decode(parts, rule, ahead, self._widths.learn)
        decode_ms = (time.perf_counter() - started) * 1e3
        kept = [result.kept for result in results]
        self._widths.hear(self._plans.took_ms, [s.confidence for s in sessions], kept, results)
        for session, result in zip(sessions, results, strict=True):
            session.advance(result)
        return [
            self._deliver(s, r, decode_ms, 1 + n)
            for s, r, n in zip(sessions, results, kept, strict=True)
        ]

    def _repeats(self, sessions: list[Session]) -> bool:
        """Whether the next step will be one of the same sequences unless somebody says a stop id.

        Whoever waits joins. And of several one may stop where the other goes on with drafts whose
        distributions the step that both were in has overwritten.
        """
        waiting = self._queue or self._prefilling or self._ready
        several = self._drafting and len(sessions) > 1
        return not (several or waiting) and all(session.goes_on for session in sessions)

    def _deliver(self, session: Session, result: Result, decode_ms: float, rows: int) -> Step:
        tokens, finish = session.take(result)
        self._reuse.passed(session, Kind.FULL)
        if finish:  # what comes next finds this conversation, so it is kept before anyone hears
            self._reuse.finish(session)
            self._retire(session)
        return Step(
            session.key,
            tokens,
            finish,
            session.prompt_tokens,
            session.cached,
            session.prefill_ms,
            decode_ms,
            rows,
        )

    def _live(self) -> list[Session]:
        return [
            *self._running,
            *self._ready,
            *([self._prefilling] if self._prefilling else []),
        ]

    def _retire(self, session: Session) -> None:
        if session is self._prefilling:
            self._prefilling = None
        elif session in self._ready:
            self._ready.remove(session)
        elif session in self._running:
            self._running.remove(session)
        self._plans.settle()  # what is under way may be a step of its slot
        self._reuse.forget(session)
        self._free.append(session.slot)

    def _warm_up(self) -> None:
        """A prompt and a decode step, so that ready means ready."""
        self.submit("warm-up", Generation((self.model.bos,), max_tokens=2, ignore_eos=True))
        while self.has_work:
            self.step()


def _check_tail(config: RuntimeConfig, model: Model) -> None:
    """Decoding reads a whole window behind the prompt, so a replay must have made it."""
    if config.prefill != "full" and config.tail < model.window:
        raise ConfigError(
            f"tail {config.tail} is shorter than the window of {model.window}: "
            f"replay at least {model.window} tokens"
        )


def _check_context(max_seq: int | None, model: Model) -> None:
    # A prompt of one token and its answer are two; positions past the model's last are untrained.
    if max_seq is not None and not 2 <= max_seq <= model.max_position:
        raise ConfigError(
            f"max_seq must be at least 2 and at most the {model.max_position} positions "
            f"of this model, got {max_seq}"
        )
