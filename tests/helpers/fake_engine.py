"""An engine without a model: what it says is chosen by the request's seed. For tests of the server.

Run as a program it is the engine process around it. Every submit and cancel is reported as a
datagram `submit KEY` or `cancel KEY` to the socket that `UF_TEST_EVENTS` names, so that tests wait
for them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as recipe

from ultraflash.runtime import Generation, RequestError, RuntimeConfig, Step
from ultraflash.runtime.errors import WeightsError
from ultraflash.server import worker

# Seeds, by what the engine does with the request.
WORDS, ECHO, SILENT, CRASH, HALF, REFUSE, STOP = 0, 1, 2, 3, 4, 5, 6

USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
CONTEXT = 100_000
STEP_S = 0.002
RHYME = "abc"  # said over and over


@dataclass
class _Sequence:
    request: Generation
    said: int = 0


class FakeEngine:
    """Prefills at once and decodes one token a step for every request."""

    fingerprint = "0123456789abcdef0123456789abcdef"
    max_seq = CONTEXT

    def __init__(self, tokenizer_json: Path) -> None:
        self._encode = recipe.Tokenizer.from_file(str(tokenizer_json)).encode
        self._live: dict[str, _Sequence] = {}
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._events_path = os.environ.get("UF_TEST_EVENTS")

    @classmethod
    def open(cls, config: RuntimeConfig, progress: Callable[[int, int], None]) -> FakeEngine:
        if os.environ.get("UF_TEST_REFUSE"):
            raise WeightsError(os.environ["UF_TEST_REFUSE"])
        progress(50_000_000, 100_000_000)
        return cls(config.checkpoint / "tokenizer.json")

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def submit(self, key: str, request: Generation) -> None:
        if request.sampling.seed == REFUSE:
            raise RequestError("ids", "this engine never runs such a request")
        self._live[key] = _Sequence(request)
        self._report("submit", key)

    def cancel(self, key: str) -> None:
        self._live.pop(key, None)
        self._report("cancel", key)

    def step(self) -> list[Step]:
        time.sleep(STEP_S)  # the step's work
        steps = [self._advance(key, sequence) for key, sequence in list(self._live.items())]
        return [step for step in steps if step is not None]

    def close(self) -> None:
        self._events.close()

    def _advance(self, key: str, sequence: _Sequence) -> Step | None:
        request = sequence.request
        if request.sampling.seed == SILENT:
            return None
        if request.sampling.seed == CRASH and sequence.said == 2:
            raise RuntimeError("the device fell off the bus")
        script = self._script(request)
        said = sequence.said
        token = script[said] if said < len(script) else None
        sequence.said += 1
        finish = None
        if token is None:
            finish = "stop"
        elif sequence.said == request.max_tokens:
            finish = "length"
        if finish:
            del self._live[key]
        tokens = () if token is None else (token,)
        decode_ms = 2.0 if said else 0.0
        return Step(key, tokens, finish, len(request.ids), 0, 1.5, decode_ms)

    def _report(self, what: str, key: str) -> None:
        if self._events_path:
            with contextlib.suppress(BlockingIOError):  # a test that reads none must not hold us
                message = f"{what} {key}".encode()
                self._events.sendto(message, socket.MSG_DONTWAIT, self._events_path)

    def _script(self, request: Generation) -> tuple[int, ...]:
        rhyme = tuple(self._encode(" ".join(RHYME)))
        match request.sampling.seed:
            case 1:  # ECHO
                (user,), (assistant,) = self._encode(USER), self._encode(ASSISTANT)
                start = len(request.ids) - request.ids[::-1].index(user)
                return request.ids[start : request.ids.index(assistant, start)]
            case 4:  # HALF
                return (*rhyme, self._encode("\u20ac")[0])
            case 6:  # STOP
                return rhyme
        return rhyme * (request.max_tokens // len(rhyme) + 1)


if __name__ == "__main__":
    raise SystemExit(worker.main(open_engine=FakeEngine.open))
