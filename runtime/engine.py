"""The engine: prompts in, tokens out, one unit of work at a time.

`Engine.step` runs one chunk of the prompt at the head of the queue and one decode step of
everything that is running.
It knows ids only: no text, no sockets, no clock but the one that measures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ultraflash.graphs.capacity import MAX_ROWS, Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.runtime.backend import Backend, Runner
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.fingerprint import fingerprint
from ultraflash.runtime.interpret import NumpyBackend
from ultraflash.runtime.request import Generation, Step, check_request
from ultraflash.runtime.session import Session
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex, weights_digest
from ultraflash.runtime.weights.load import load_weights
from ultraflash.runtime.weights.token_map import check_special_ids

Progress = Callable[[int, int], None]


class Engine:
    """One model, its plans, and the conversations on it. Not thread-safe: one thread drives it."""

    def __init__(
        self, model: Model, backend: Backend, config: RuntimeConfig, checkpoint_digest: str
    ) -> None:
        """Use `open`."""
        self.model, self._backend, self._config = model, backend, config
        self.max_seq = config.max_seq or model.max_position
        # One slot more than decode at once, so that a prompt can prefill meanwhile.
        self._capacity = Capacity(config.max_sequences + 1, self.max_seq)
        self._decode: dict[int, Runner] = {}
        self._prefill: dict[int, Runner] = {}
        self._free = list(range(self._capacity.slots))
        self._queue: deque[tuple[str, Generation]] = deque()
        self._prefilling: Session | None = None
        self._ready: deque[Session] = deque()  # prefilled, waiting for a place among the running
        self._running: list[Session] = []
        plans = [
            self._decode_runner(1).plan,
            *(self._prefill_runner(n).plan for n in config.prefill_chunks),
        ]
        self.fingerprint = fingerprint(
            config, backend, checkpoint_digest, model, self.max_seq, plans
        )

    @classmethod
    def open(cls, config: RuntimeConfig, progress: Progress | None = None) -> Engine:
        """Load a checkpoint and run one real step. `progress` receives (bytes done, bytes in all).

        Raises:
            EngineError: when the checkpoint, the settings or the machine do not allow it.
            GraphError: when the configuration or the world does not fit the model.
        """
        if config.max_sequences > MAX_ROWS:
            raise ConfigError(
                f"max_sequences {config.max_sequences} is more than the {MAX_ROWS} rows "
                f"of the widest step: set {MAX_ROWS} at most"
            )
        prepare_cache_dir(config)
        index = CheckpointIndex.open(config.checkpoint)
        model = Model.from_checkpoint(config.checkpoint)
        _check_context(config.max_seq, model)
        check_special_ids(config.checkpoint / "tokenizer.json", model)
        weights = load_weights(
            index, model, config.world, progress=progress, cache_dir=config.cache_dir
        )
        backend = NumpyBackend(weights, config.world, config.check)
        engine = cls(model, backend, config, weights_digest(index))
        engine._warm_up()
        return engine

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._queue or self._prefilling or self._ready or self._running)

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
                self._retire(session)

    def step(self) -> list[Step]:
        """One decode step of all running sequences, then one chunk of the prompt whose turn it
        is."""
        return self._decode_once() + self._prefill_once()

    def close(self) -> None:
        """Forget all requests."""
        self._queue.clear()
        for session in self._live():
            self._retire(session)

    # --- prefill ---

    def _prefill_once(self) -> list[Step]:
        if self._prefilling is None and self._queue and self._free:
            key, request = self._queue.popleft()
            self._prefilling = Session.start(
                key, request, self._free.pop(0), self.model.eos, self.max_seq
            )
        session = self._prefilling
        if session is None:
            return []
        started = time.perf_counter()
        chunks = self._config.prefill_chunks
        rows = next((n for n in chunks if n >= session.waiting), chunks[-1])
        part = session.part(rows)
        token = self._run(self._prefill_runner(rows), [part])[0]
        session.done += len(part.ids)
        session.prefill_ms += (time.perf_counter() - started) * 1e3
        if session.waiting:
            return []
        self._prefilling = None
        self._ready.append(session)
        return [self._deliver(session, token, 0.0)]

    def _prefill_runner(self, rows: int) -> Runner:
        if rows not in self._prefill:
            plan = build_prefill(
                self.model,
                rows,
                self._capacity,
                world=self._backend.world,
                round_attention=self._rounds,
            )
            self._prefill[rows] = self._compile(plan)
        return self._prefill[rows]

    # --- decode ---

    def _decode_once(self) -> list[Step]:
        while self._ready and len(self._running) < self._config.max_sequences:
            self._running.append(self._ready.popleft())
        if not self._running:
            return []
        started = time.perf_counter()
        sessions = list(self._running)
        tokens = self._run(self._decode_runner(len(sessions)), [s.part(1) for s in sessions])
        decode_ms = (time.perf_counter() - started) * 1e3
        for session in sessions:
            session.done += 1
            session.steps += 1
        return [
            self._deliver(s, token, decode_ms) for s, token in zip(sessions, tokens, strict=True)
        ]

    def _decode_runner(self, sequences: int) -> Runner:
        if sequences not in self._decode:
            plan = build_decode(
                self.model,
                sequences,
                sequences,
                self._capacity,
                world=self._backend.world,
                round_attention=self._rounds,
            )
            self._decode[sequences] = self._compile(plan)
        return self._decode[sequences]

    # --- shared ---

    @property
    def _rounds(self) -> bool:
        return self._config.attention_weights == "bf16"

    def _compile(self, plan: Plan) -> Runner:
        if "plan" in self._config.dump:
            name = f"{plan.name}-rows{plan.rows}-sequences{plan.sequences}-world{plan.world}.plan"
            (self._config.cache_dir / name).write_text(plan.text(), encoding="utf-8")
        runner = self._backend.compile(plan)
        write_constants(runner)
        return runner

    def _run(self, runner: Runner, parts: list[Part]) -> list[int]:
        write_step(runner, parts)
        runner.run()
        tokens: list[int] = runner.read("io.token").tolist()
        return tokens

    def _deliver(self, session: Session, token: int, decode_ms: float) -> Step:
        finish = session.accept(token)
        if finish:
            self._retire(session)
        tokens = () if finish == "stop" else (token,)
        return Step(
            session.key, tokens, finish, session.prompt_tokens, 0, session.prefill_ms, decode_ms
        )

    def _live(self) -> list[Session]:
        return [*self._running, *self._ready, *([self._prefilling] if self._prefilling else [])]

    def _retire(self, session: Session) -> None:
        if session is self._prefilling:
            self._prefilling = None
        elif session in self._ready:
            self._ready.remove(session)
        elif session in self._running:
            self._running.remove(session)
        self._free.append(session.slot)

    def _warm_up(self) -> None:
        """A prompt and a decode step, so that ready means ready; the slot's contents are
        overwritten by position."""
        self.submit("warm-up", Generation((self.model.bos,), max_tokens=2, ignore_eos=True))
        while self.has_work:
            self.step()


def _check_context(max_seq: int | None, model: Model) -> None:
    # A prompt of one token and its answer are two; positions past the model's last are untrained.
    if max_seq is not None and not 2 <= max_seq <= model.max_position:
        raise ConfigError(
            f"max_seq must be at least 2 and at most the {model.max_position} positions "
            f"of this model, got {max_seq}"
        )
