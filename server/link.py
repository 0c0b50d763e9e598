"""The HTTP side's end of the socket: requests go out by key, each answer comes back as a stream.

One thread reads; it connects again for ever when the engine process is replaced. When the
connection ends, every stream ends with `EngineLost` at once.
"""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ultraflash.server.errors import ClientGone, EngineLost, RequestError, ServerError, Unready
from ultraflash.server.messages import (
    Abort,
    FrameError,
    Frames,
    FromEngine,
    Opened,
    Opening,
    Refused,
    StepOf,
    Steps,
    Submit,
    ToEngine,
    frame,
)

_log = logging.getLogger(__name__)

_RETRY_S = 0.05
_SEND_TIMEOUT_S = 5


class EngineStream:
    """What the engine gives one request: `get` until a step with `finish`, or an error."""

    def __init__(self, link: Link, key: str) -> None:
        """Not submitted yet."""
        self.key = key
        self._link = link
        self._items: queue.SimpleQueue[StepOf | ServerError] = queue.SimpleQueue()
        self._error: ServerError | None = None

    def get(self, timeout_s: float) -> StepOf | None:
        """The next step of this request; None when none came within `timeout_s`.

        Raises:
            RequestError: the engine says that the request can never run.
            EngineLost: the engine process ended.
            ClientGone: `hang_up` was called.
        """
        try:
            item = self._error or self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, ServerError):
            raise item
        return item

    def get_more(self) -> list[StepOf]:
        """The steps that are there already; an error behind them is left to the next `get`."""
        steps: list[StepOf] = []
        while self._error is None and not self._items.empty():
            item = self._items.get()
            if isinstance(item, ServerError):
                self._error = item
            else:
                steps.append(item)
        return steps

    def put(self, item: StepOf | ServerError) -> None:
        """Give the reader a step, or end it with an error."""
        self._items.put(item)

    def hang_up(self) -> None:
        """The client went away: wake the reader and stop the engine working for it."""
        self.put(ClientGone("the client hung up"))
        self._link.abort(self.key)

    def close(self) -> None:
        """Stop the engine working for this request, if it still does."""
        self._link.abort(self.key)


@dataclass(frozen=True)
class LinkState:
    """How far the engine process at the other end is.

    `opened` is None until it takes requests; `progress` then says what it is doing, if a process is
    there. `lost_pid` is the engine process whose connection ended last.
    """

    opened: Opened | None
    progress: Opening | None
    pending: int
    quiet_s: float  # since the last sign of life while requests are pending
    lost_pid: int | None = None


class Link:
    """The connection to the engine process, whichever process that is at the moment."""

    def __init__(self, path: Path) -> None:
        """Nothing happens before `start`."""
        self._path = path
        self._lock = threading.Lock()  # guards the next five
        self._socket: socket.socket | None = None
        self._streams: dict[str, EngineStream] = {}
        self._opened: Opened | None = None
        self._progress: Opening | None = None
        self._lost_pid: int | None = None
        self._send_lock = threading.Lock()
        self._last_sign = time.monotonic()
        self._closing = threading.Event()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Begin connecting."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; every stream ends with an error."""
        self._closing.set()
        with self._lock:
            if self._socket is not None:
                _shut(self._socket)
        self._thread.join()

    @property
    def state(self) -> LinkState:
        """How the other end is now."""
        with self._lock:
            pending = len(self._streams)
            quiet_s = time.monotonic() - self._last_sign if pending else 0.0
            return LinkState(self._opened, self._progress, pending, quiet_s, self._lost_pid)

    def wait_opened(self, timeout_s: float) -> bool:
        """Whether the engine takes requests before `timeout_s` is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._opened is not None, timeout_s)

    def submit(self, request: Submit) -> EngineStream:
        """Hand a request to the engine.

        Raises:
            Unready: when no engine takes requests.
        """
        stream = EngineStream(self, request.key)
        with self._lock:
            if self._opened is None:
                raise Unready("the engine is not ready; ask GET /readyz for the reason")
            if not self._streams:
                self._last_sign = time.monotonic()
            self._streams[request.key] = stream
            sock = self._socket
        self._send(sock, request)
        return stream

    def abort(self, key: str) -> None:
        """Forget a request; nothing happens when it has ended."""
        with self._lock:
            known = self._streams.pop(key, None) is not None
            sock = self._socket
        if known:
            self._send(sock, Abort(key))

    def fail_all(self, error: ServerError) -> None:
        """End every stream with `error` and stop the engine working for them."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.put(error)
            stream.close()

    def _send(self, sock: socket.socket | None, message: ToEngine) -> None:
        """Send over the connection that the request belongs to, never over a later one."""
        if sock is None:
            return
        data = frame(message)
        with self._send_lock:
            try:
                sock.sendall(data)
            except OSError as error:
                _log.warning("cannot send to the engine process: %s", error)
                _shut(sock)

    def _run(self) -> None:
        while not self._closing.is_set():
            sock = self._connect()
            if sock is None:
                self._closing.wait(_RETRY_S)
                continue
            with sock:
                pid = _peer_pid(sock)
                self._read(sock)
                self._disconnect(pid)

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            return None
        # Sending must not wait for ever on an engine process that stopped reading; receiving may.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_TIMEOUT_S, 0)
        )
        with self._lock:
            self._socket = sock
            if self._closing.is_set():
                _shut(sock)
        return sock

    def _read(self, sock: socket.socket) -> None:
        frames = Frames()
        while True:
            try:
                data = sock.recv(1 << 18)
            except OSError:
                return
            if not data:
                return
            try:
                for body in frames.feed(data):
                    self._take(msgspec.msgpack.decode(body, type=FromEngine))
            except (FrameError, msgspec.DecodeError) as error:
                _log.error("the engine process sent what is not a message: %s", error)
                return

    def _take(self, message: FromEngine) -> None:
        self._last_sign = time.monotonic()
        match message:
            case Steps(_, items):
                for item in items:
                    stream = self._stream(item.key, ended=item.finish is not None)
                    if stream is not None:
                        stream.put(item)
            case Refused(key, field, text):
                stream = self._stream(key, ended=True)
                if stream is not None:
                    stream.put(RequestError(field, text))
            case Opening():
                with self._lock:
                    self._progress = message
            case Opened():
                with self._changed:
                    self._opened = message
                    self._changed.notify_all()

    def _stream(self, key: str, *, ended: bool) -> EngineStream | None:
        with self._lock:
            return self._streams.pop(key, None) if ended else self._streams.get(key)

    def _disconnect(self, pid: int) -> None:
        # In this order: a request submitted after the lock is released finds no engine and is
        # refused.
        with self._lock:
            self._socket, self._opened, self._progress = None, None, None
            self._lost_pid = pid
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.put(EngineLost("the engine process ended during this request; send it again"))


def _peer_pid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already
