"""State between device and host while steps run.

Out: rows are gathered into a lane's device memory on the stream of the steps, before the next step
can overwrite them; a stream of its own carries them to the lane's pinned memory; a thread copies
them to memory that they may keep, which frees the lane. Back: the same way in reverse, and the
steps wait for it on the device. Nothing here knows what state is, only addresses and sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ultraflash.runtime.backend import Bytes
from ultraflash.runtime.gpu.driver import Address, Device, Event, Function, Pinned, Stream, allocate
from ultraflash.runtime.gpu.nvrtc import Unit

# A full-size restore point has 2.9 MB, a segment of 8,192 tokens 7.3 MB: the lanes hold three pairs
# of them, which is what leaves when three answers end in one step.
LANES, LANE_BYTES = 9, 4 << 20
_THREADS = 4
_PIECES = 170  # of one launch: its arguments stay below 4 KiB
_CTA_BYTES = 16 << 10  # that a CTA moves, about
_MAX_CTAS = 64  # of a piece

UNIT = Unit(
    "state/move_rows",
    f"struct Piece {{ u64 to, from, bytes; }};\nstruct Args {{ Piece pieces[{_PIECES}]; }};\n",
)


class Span(NamedTuple):
    """A stretch of device memory."""

    address: Address
    size: int


class Arriving:
    """Implements `Staged`: a buffer that threads are filling."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        """`data` is written to by those threads alone; `parts` are what they do."""
        self.data = data
        self.parts: list[Future[None]] = []

    def wait(self, seconds: float | None = None) -> bool:
        """Whether all of it is there, after at most `seconds`; None: however long it takes."""
        return not wait(self.parts, seconds).not_done

    def take(self) -> memoryview:
        """The bytes, waited for.

        Raises:
            DeviceError: when the copy failed.
        """
        for part in self.parts:
            part.result()
        self.data.flags.writeable = False
        return self.data.data


class _Lane:
    """A buffer on the device and one of the same size on the host."""

    def __init__(self) -> None:
        self.host, self.address = Pinned(LANE_BYTES), allocate(LANE_BYTES, "staging of state")
        self.gathered, self.moved = Event(timing=False), Event(timing=False)
        self.last: Future[None] | None = None  # `moved` is recorded before it is done

    def wait(self) -> None:
        """Until nobody uses it."""
        if self.last is not None:
            self.last.result()
            self.moved.wait()


class _Leaving(NamedTuple):
    """A lane's load on its way out: whose it is, from which byte on, how many bytes."""

    lane: _Lane
    to: Arriving
    at: int
    size: int


class Copies:
    """Moves stretches of one device's memory out and back, beside the steps on `steps`."""

    def __init__(self, device: Device, steps: Stream, move: Function) -> None:
        """`move`: the kernel of `UNIT`."""
        self._steps, self._move_rows, self._stream = steps, move, Stream()
        self._lanes = [_Lane() for _ in range(LANES)]
        self._turn = 0
        self._all_sent, self._steps_so_far = Event(timing=False), Event(timing=False)
        self._pool = ThreadPoolExecutor(_THREADS, "state copies", initializer=device.enter)

    def stage(self, parts: Sequence[tuple[bytes, Sequence[Span]]]) -> list[Arriving]:
        """Begin to bring out parts, each a head and behind it its spans, as the steps queued so far
        leave them.

        Waits only while all lanes are busy. The threads are called once, behind everything else:
        while one of them wakes up, this one stands still at every call of the driver.
        """
        made: list[Arriving] = []
        leaving: list[_Leaving] = []
        for head, spans in parts:
            whole = np.empty(len(head) + sum(size for _, size in spans), np.uint8)
            whole[: len(head)] = np.frombuffer(head, np.uint8)
            made.append(Arriving(whole))
            at = len(head)
            for load in _loads(spans):
                if len(leaving) == LANES:
                    self._collect(leaving)
                    leaving = []
                leaving.append(_Leaving(self._gather(load), made[-1], at, load.size))
                at += load.size
        self._collect(leaving)
        return made

    def restore(self, spans: Sequence[Span], data: Sequence[Bytes]) -> None:
        """Put bytes into as many spans of their sizes; steps queued from now on see them.

        Steps queued before have the memory to themselves. Returns when `data` may go.
        """
        self._steps_so_far.record(self._steps)
        self._stream.wait_for(self._steps_so_far)
        sources, parts = _Source(data), []
        for load in _loads(spans):
            lane = self._next_lane()
            pieces = sources.take(load.size)
            lane.last = self._pool.submit(self._send, lane, load, pieces)
            parts.append(lane.last)
        for part in parts:
            part.result()
        self._all_sent.record(self._stream)
        self._steps.wait_for(self._all_sent)

    def _gather(self, load: _Load) -> _Lane:
        lane = self._next_lane()
        self._move(self._steps, load.pieces(lane.address, inwards=False))
        lane.gathered.record(self._steps)
        self._stream.wait_for(lane.gathered)
        self._stream.copy_out(lane.host.address, lane.address, load.size)
        lane.moved.record(self._stream)
        return lane

    def _collect(self, leaving: list[_Leaving]) -> None:
        if leaving:
            part = self._pool.submit(_collect, leaving)
            for one in leaving:
                one.lane.last = part
                one.to.parts.append(part)

    def _send(self, lane: _Lane, load: _Load, data: list[memoryview]) -> None:
        at = 0
        for piece in data:
            np.copyto(lane.host.bytes[at : at + len(piece)], np.frombuffer(piece, np.uint8))
            at += len(piece)
        self._stream.copy_in(lane.address, lane.host.address, at)
        self._move(self._stream, load.pieces(lane.address, inwards=True))
        lane.moved.record(self._stream)

    def _next_lane(self) -> _Lane:
        lane = self._lanes[self._turn % LANES]
        self._turn += 1
        lane.wait()
        return lane

    def _move(self, stream: Stream, pieces: npt.NDArray[np.uint64]) -> None:
        for start in range(0, len(pieces), _PIECES):
            some = pieces[start : start + _PIECES]
            args = np.zeros((_PIECES, 3), np.uint64)
            args[: len(some)] = some
            ctas = min(_MAX_CTAS, -(-int(some[:, 2].max()) // _CTA_BYTES))
            stream.launch(self._move_rows, (len(some), ctas, 1), (256, 1, 1), 0, args.tobytes())


class _Source:
    """Takes bytes from a row of buffers as if they were one."""

    def __init__(self, data: Sequence[Bytes]) -> None:
        self._left = [memoryview(part) for part in reversed(data)]

    def take(self, size: int) -> list[memoryview]:
        taken = []
        while size:
            part = self._left.pop()
            if len(part) > size:
                self._left.append(part[size:])
                part = part[:size]
            taken.append(part)
            size -= len(part)
        return taken


def _collect(leaving: list[_Leaving]) -> None:
    for lane, to, at, size in leaving:
        lane.moved.wait()
        np.copyto(to.data[at : at + size], lane.host.bytes[:size])


class _Load(NamedTuple):
    """Stretches of memory that fill a lane, or the rest of it: addresses and sizes. u64 [n] each.

    Arrays, for a restore point has a hundred stretches and the next step waits for them.
    """

    address: npt.NDArray[np.uint64]
    bytes: npt.NDArray[np.uint64]

    @property
    def size(self) -> int:
        return int(self.bytes.sum())

    def pieces(self, lane: Address, *, inwards: bool) -> npt.NDArray[np.uint64]:
        """What the kernel moves: (to, from, bytes) each. [n, 3]."""
        staged = np.uint64(lane) + np.cumsum(self.bytes) - self.bytes
        ends = (self.address, staged) if inwards else (staged, self.address)
        return np.stack([*ends, self.bytes], axis=1)


def _loads(spans: Sequence[Span]) -> Iterator[_Load]:
    """The spans one behind the other, cut into loads of a lane."""
    address, size = np.array(spans, np.uint64).reshape(-1, 2).T
    ends = np.cumsum(size)
    total = int(ends[-1]) if len(ends) else 0
    lanes = np.arange(LANE_BYTES, total, LANE_BYTES, dtype=np.uint64)
    bounds = np.union1d(ends, lanes)  # where a span or a lane ends
    bounds = bounds[bounds > 0]
    first = np.concatenate([np.zeros(1, np.uint64), bounds[:-1]])[: len(bounds)]
    span = np.searchsorted(ends, first, "right")
    begins = address[span] + first - (ends - size)[span]
    cuts = np.searchsorted(first, lanes)
    for part, count in zip(np.split(begins, cuts), np.split(bounds - first, cuts), strict=True):
        if len(part):
            yield _Load(part, count)
