"""One chat completion from its body to its last byte.

`ChatService.begin` checks, renders and admits a request and waits for the engine's first word, so
that what can still be an HTTP error is one. The `ChatCall` it gives is iterated for a streamed
answer, or completed.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ultraflash.server.arrival import ArrivalClock
from ultraflash.server.body import parse_object
from ultraflash.server.errors import (
    ClientGone,
    EngineLost,
    RequestError,
    Unready,
    internal_problem,
    problem,
)
from ultraflash.server.hangup import HangupWatcher
from ultraflash.server.inbox import Budget, Inbox, Ticket
from ultraflash.server.link import EngineStream, Link
from ultraflash.server.messages import StepOf, Submit, pack_ids
from ultraflash.server.protocol import Answer, ChatProtocol, Piece, Prompt
from ultraflash.server.readiness import Gate
from ultraflash.server.request_log import RequestRecord
from ultraflash.server.schema import ChatBody, parse_chat
from ultraflash.server.sse import KEEP_ALIVE, ChunkWriter, error_event

_log = logging.getLogger(__name__)

_FOREVER_S = 3600.0
# Bytes of bodies; encoding takes 100 to 200 bytes of memory for each, and a second for a million.
_ENCODED_AT_ONCE = 4 << 20
_SMALL_BODY = 1 << 16  # all that may be open together need little more, and wait for nobody


@dataclass(frozen=True)
class ChatService:
    """What chat completions need; one for the whole server."""

    protocol: ChatProtocol
    link: Link
    gate: Gate
    inbox: Inbox
    clock: ArrivalClock
    watcher: HangupWatcher
    keep_alive_s: float
    _encoding: Budget = field(default_factory=lambda: Budget(_ENCODED_AT_ONCE), init=False)

    def begin(self, data: bytes, client: socket.socket | None, ticket: Ticket) -> ChatCall:
        """Start a request that has entered; `client` is watched for a hang-up until the call, which
        owns the ticket from its return on, is closed.

        Raises:
            RequestError: the body is wrong, or the engine can never run it.
            Unready: the server takes no requests now.
            Overloaded: too many wait.
            EngineLost: the engine process ended before its first word.
            ClientGone: the client hung up before it.
        """
        body = parse_chat(parse_object(data))
        self.gate.require()
        opened = self.link.state.opened
        if opened is None:  # it ended since the gate looked
            raise Unready("the engine process has just ended; try again in a moment")
        ticket.admit()
        with self._encoding.hold(len(data)) if len(data) > _SMALL_BODY else nullcontext():
            prompt = self.protocol.prepare(body, opened.max_seq)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        answer = self.protocol.answer(prompt, request_id, body)
        ticket.wait(len(prompt.ids))
        stream = self.link.submit(_submission(request_id, prompt, body))
        call = ChatCall(self, body, prompt, answer, ticket, stream, opened.fingerprint)
        try:
            call.start(client)
        except BaseException:
            call.close()
            raise
        return call


class ChatCall:
    """An admitted request. `close` it in every case: that stops the engine and logs the end."""

    def __init__(
        self,
        service: ChatService,
        body: ChatBody,
        prompt: Prompt,
        answer: Answer,
        ticket: Ticket,
        stream: EngineStream,
        fingerprint: str,
    ) -> None:
        """It has been submitted."""
        self.id = stream.key
        self.streamed = body.stream
        self._service, self._body, self._prompt = service, body, prompt
        self._answer, self._ticket, self._stream = answer, ticket, stream
        self._created = int(time.time())
        self._fingerprint = f"fp_{fingerprint[:12]}"
        self._record = RequestRecord(self.id, len(prompt.ids))
        self._client: int | None = None
        self._first: StepOf | None = None
        self._events: Iterator[bytes] | None = None
        self._ended = False

    def start(self, client: socket.socket | None) -> None:
        """Watch the client, and wait a little for the first step."""
        if client is not None:
            self._client = client.fileno()
            self._service.watcher.watch(self._client, self._stream.hang_up)
        self._first = self._get(self._service.keep_alive_s)

    def complete(self) -> bytes:
        """The whole answer as one response body; raises as `ChatService.begin` does."""
        step = self._first
        while not self._ended:
            if step is not None:
                self._advance(step)
            if not self._ended:
                step = self._get(_FOREVER_S)
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._body.requested_model,
                "choices": [self._answer.message()],
                "usage": self._usage(),
                "system_fingerprint": self._fingerprint,
            }
        )

    def __iter__(self) -> Iterator[bytes]:
        """The events of a streamed answer."""
        return self

    def __next__(self) -> bytes:
        """The next bytes to send; never raises anything but StopIteration."""
        if self._events is None:
            self._events = self._stream_events()
        return next(self._events)

    def close(self) -> None:
        """Let go of engine, client and place in the queue; once or more."""
        if self._client is not None:
            self._service.watcher.unwatch(self._client)
            self._client = None
        self._stream.close()
        self._ticket.close()
        self._record.completion_tokens = self._answer.completion_tokens
        self._record.write()

    def _stream_events(self) -> Iterator[bytes]:
        try:
            yield from self._answer_events()
        except ClientGone:
            return
        except (EngineLost, RequestError) as error:
            yield error_event(problem(error))
        except Exception:  # noqa: BLE001 - an exception here would cut the stream without a word
            self._record.finish = "error"
            _log.exception("%s failed while streaming", self.id)
            yield error_event(internal_problem(self.id))

    def _answer_events(self) -> Iterator[bytes]:
        writer = ChunkWriter(
            self.id,
            self._body.requested_model,
            self._created,
            self._fingerprint,
            include_usage=self._body.include_usage,
            usage_in_each=self._body.usage_in_each,
        )
        keep_alive_s = self._service.keep_alive_s
        step, spoke = self._first, time.monotonic()
        if step is None:
            yield KEEP_ALIVE
        while not self._ended:
            data = b""
            # All that is there goes out in one write.
            for each in [] if step is None else [step, *self._stream.get_more()]:
                data += writer.pieces(self._advance(each), self._usage)
            if data:
                yield data
                spoke = time.monotonic()
            if not self._ended:
                step = self._get(max(0.0, spoke + keep_alive_s - time.monotonic()))
                if step is None:
                    yield KEEP_ALIVE
                    spoke = time.monotonic()
        yield writer.end(self._usage)

    def _advance(self, step: StepOf) -> list[Piece]:
        """Take one step of the engine into the answer; a step behind its end gives nothing."""
        if self._ended:
            return []
        self._ticket.begun()
        self._record.step(step)
        pieces = self._answer.push(step.tokens)
        if step.finish is not None:
            pieces += self._answer.finish(step.finish)
        if step.finish is not None or self._answer.stopped:
            self._ended = True
            self._record.finish = pieces[-1].finish_reason or "stop"
            self._stream.close()  # after a stop string the engine would go on
        return pieces

    def _usage(self) -> dict[str, Any]:
        return self._answer.usage(len(self._prompt.ids), self._record.cached_tokens)

    def _get(self, timeout_s: float) -> StepOf | None:
        try:
            return self._stream.get(timeout_s)
        except EngineLost:
            self._record.finish = "error"
            raise
        except RequestError as error:  # the engine speaks of ids, the client sent messages
            self._record.finish = "error"
            field = "messages" if error.field == "ids" else error.field
            raise RequestError(field, error.message) from error


def _submission(request_id: str, prompt: Prompt, body: ChatBody) -> Submit:
    return Submit(
        key=request_id,
        ids=pack_ids(prompt.ids),
        max_tokens=prompt.max_tokens(body.max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
    )
