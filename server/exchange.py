"""The engine process's end of the socket: reads requests of HTTP processes, posts their tokens.

One thread reads and accepts; the engine's thread posts. A post never blocks: what the socket does
not take is kept and sent by the reading thread, and a reader that stays too far behind loses its
connection (its requests end), never the engine's pace.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import socket
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from ultraflash.server.messages import FrameError, Frames, FromEngine, Opening, ToEngine, frame

MAX_BACKLOG_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class Received(NamedTuple):
    """One message and where it came from; message None: this connection has ended.

    Both None: `Exchange.wake` was called.
    """

    connection: Connection | None
    message: ToEngine | None


class Connection:
    """One HTTP process."""

    def __init__(self, sock: socket.socket, wake: Wake) -> None:
        """Take over a connected, non-blocking socket."""
        self.socket = sock
        self.frames = Frames()
        self._wake = wake
        self._lock = threading.Lock()
        self._backlog = bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._backlog)

    def post(self, message: FromEngine) -> None:
        """Send without ever blocking."""
        data = frame(message)
        with self._lock:
            self._backlog += data
            if len(self._backlog) == len(data):
                self._send()
            if len(self._backlog) > MAX_BACKLOG_BYTES:
                _log.warning("an HTTP process fell %d bytes behind: dropped", len(self._backlog))
                self._break()
            if self._backlog:
                self._wake.set()

    def flush(self) -> None:
        """Send what the socket takes now of what waits."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        try:
            del self._backlog[: self.socket.send(self._backlog)]
        except BlockingIOError:
            return
        except OSError:
            self._break()

    def _break(self) -> None:
        """End the connection; the reading thread then finds its end and reports it."""
        self._backlog.clear()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already


class Wake:
    """A descriptor that one thread sets to wake another's selector."""

    def __init__(self) -> None:
        """Not set."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while set."""
        return self._fd

    def set(self) -> None:
        """Wake the selector."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Not set again."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


class Exchange:
    """Listens on a Unix socket; `received` yields what arrives, in order."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`, replacing the socket of an engine process that has ended.

        Raises:
            OSError: when the directory is gone or the path too long.
        """
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._wake = Wake()
        self._closing = False
        self._connections: set[Connection] = set()
        self._greeting: FromEngine = Opening(0, 0)
        self._greeting_lock = threading.Lock()
        self._received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def announce(self, greeting: FromEngine) -> None:
        """Tell every connection, now and to come, how far the engine is."""
        with self._greeting_lock:
            self._greeting = greeting
            for connection in self._connections:
                connection.post(greeting)

    def receive(self, *, wait: bool) -> Received | None:
        """The next message; None when there is none and `wait` is false."""
        try:
            return self._received.get(block=wait)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Make a waiting `receive` return; safe in a signal handler."""
        self._received.put(Received(None, None))

    def close(self) -> None:
        """End the thread and every connection."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                for key, events in selector.select():
                    if key.fileobj is self._wake:
                        self._wake.clear()
                        self._watch_writers(selector)
                    elif key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._serve(selector, key.data, events)
            for connection in list(self._connections):
                self._drop(selector, connection)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        connection = Connection(sock, self._wake)
        selector.register(sock, selectors.EVENT_READ, connection)
        with self._greeting_lock:
            self._connections.add(connection)
            connection.post(self._greeting)

    def _serve(self, selector: selectors.BaseSelector, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
            if not connection.is_behind:
                selector.modify(connection.socket, selectors.EVENT_READ, connection)
        if events & selectors.EVENT_READ:
            try:
                data = connection.socket.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data or not self._take(connection, data):
                self._drop(selector, connection)

    def _take(self, connection: Connection, data: bytes) -> bool:
        """Queue the messages that `data` completes; False when it is not our protocol."""
        try:
            for body in connection.frames.feed(data):
                message = msgspec.msgpack.decode(body, type=ToEngine)
                self._received.put(Received(connection, message))
        except (FrameError, msgspec.DecodeError) as error:
            _log.error("an HTTP process sent what is not a message (%s): dropped", error)
            return False
        return True

    def _drop(self, selector: selectors.BaseSelector, connection: Connection) -> None:
        selector.unregister(connection.socket)
        with self._greeting_lock:
            self._connections.discard(connection)
        connection.socket.close()
        self._received.put(Received(connection, None))

    def _watch_writers(self, selector: selectors.BaseSelector) -> None:
        for connection in self._connections:
            if connection.is_behind:
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                selector.modify(connection.socket, both, connection)
