"""Where restore points are kept between requests: the interface, and the simplest form of it.

A store knows keys and bytes only. `LocalStore` lives in the engine's memory; another process can
take its place behind `Store`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Protocol

from ultraflash.runtime.backend import Bytes
from ultraflash.runtime.resume import Kind

TURN_POINTS = 4  # newest ones kept of a conversation
REGULAR_POINTS = 16  # kept of those at regular lengths, dense near the end


class Role(Flag):
    """Why a point was taken, and so how long it is worth keeping."""

    TURN = auto()  # before the model's turn, or at its end
    REGULAR = auto()  # at a multiple of the segment length
    SYSTEM = auto()  # at the end of the system prompt


@dataclass(frozen=True, slots=True)
class SegmentId:
    """A stretch of global KV: positions [start, end) of any conversation whose first `end` content
    ids have this key.
    """

    key: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Point:
    """A restore point without the global KV that belongs to it."""

    length: int
    kind: Kind
    role: Role
    data: Bytes


@dataclass(frozen=True, slots=True)
class Hit:
    """What was found under `keys[index]`: a point and the segments up to its length."""

    index: int
    point: Point
    ids: tuple[SegmentId, ...]
    segments: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """What a store holds, and what has happened since it was made."""

    points: int
    segments: int
    nbytes: int
    hits: int
    misses: int
    evicted: int
    refused: int


class Store(Protocol):
    """Keeps points as long as it can; may forget any of them at any time."""

    def find(self, keys: Sequence[bytes]) -> Hit | None:
        """The point under the first of `keys` that there is, longest first."""

    def missing(self, ids: Sequence[SegmentId]) -> list[SegmentId]:
        """Those of `ids` whose bytes `publish` has to bring."""

    def publish(
        self,
        key: bytes,
        point: Point,
        ids: Sequence[SegmentId],
        new: Mapping[SegmentId, Bytes],
        lineage: Collection[bytes],
    ) -> None:
        """Keep a point, unless it could never fit or a segment of it is neither here nor new: the
        store may have forgotten one since `missing` was asked.

        `ids` are the segments that cover it, from position 0 on, `new` the bytes of those that are
        missing; `lineage` the keys under which earlier points of the same conversation may stand.
        """

    def stats(self) -> Stats:
        """Counts for logs and tests."""


@dataclass(slots=True)
class _Entry:
    point: Point
    ids: tuple[SegmentId, ...]


class LocalStore:
    """Points in this process's memory, the least recently used given up first."""

    def __init__(self, limit_bytes: int) -> None:
        """Empty; points and segments together never exceed the limit."""
        self._limit = limit_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # oldest use first
        self._segments: dict[SegmentId, Bytes] = {}
        self._uses: Counter[SegmentId] = Counter()  # points that need a segment
        self._nbytes = 0
        self._hits = self._misses = self._evicted = self._refused = 0

    def find(self, keys: Sequence[bytes]) -> Hit | None:
        """The point under the first of `keys` that there is; it counts as used."""
        for index, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is not None:
                self._hits += 1
                self._entries.move_to_end(key)
                data = tuple(self._segments[i] for i in entry.ids)
                return Hit(index, entry.point, entry.ids, data)
        self._misses += 1
        return None

    def missing(self, ids: Sequence[SegmentId]) -> list[SegmentId]:
        """Those of `ids` that no point here holds."""
        return [i for i in ids if i not in self._segments]

    def publish(
        self,
        key: bytes,
        point: Point,
        ids: Sequence[SegmentId],
        new: Mapping[SegmentId, Bytes],
        lineage: Collection[bytes],
    ) -> None:
        """Keep a point, thin out its conversation, then make room; or count it as refused.

        Under a key that is taken, the roles add up and a full point replaces an encoder's.
        """
        found = {i: self._segments.get(i) or new[i] for i in ids if i in self._segments or i in new}
        size = len(point.data) + sum(map(len, found.values()))
        if len(found) < len(ids) or size > self._limit:
            self._refused += 1
            return
        old = self._entries.get(key)
        if old is not None:
            data = old.point if point.kind is Kind.ENCODER else point
            role = old.point.role | point.role
            point = Point(point.length, data.kind, role, data.data)
        self._insert(key, _Entry(point, tuple(ids)), found)
        for faded in _faded(self._of(lineage) | {key: point}):
            self._drop(faded)
        while self._nbytes > self._limit:
            self._evicted += 1
            self._drop(next(iter(self._entries)))

    def stats(self) -> Stats:
        """Counts so far."""
        return Stats(
            len(self._entries),
            len(self._segments),
            self._nbytes,
            self._hits,
            self._misses,
            self._evicted,
            self._refused,
        )

    def _of(self, keys: Collection[bytes]) -> dict[bytes, Point]:
        return {key: self._entries[key].point for key in keys if key in self._entries}

    def _insert(self, key: bytes, entry: _Entry, found: Mapping[SegmentId, Bytes]) -> None:
        for i in entry.ids:
            if i not in self._segments:
                self._segments[i] = found[i]
                self._nbytes += len(found[i])
            self._uses[i] += 1
        self._nbytes += len(entry.point.data)
        if key in self._entries:  # after its segments are held twice, so that none is let go
            self._drop(key)
        self._entries[key] = entry

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._nbytes -= len(entry.point.data)
        for i in entry.ids:
            self._uses[i] -= 1
            if not self._uses[i]:
                del self._uses[i]
                self._nbytes -= len(self._segments.pop(i))


def _faded(points: Mapping[bytes, Point]) -> list[bytes]:
    """Keys of one conversation's points that none of their roles keeps."""
    longest_first = sorted(points, key=lambda key: points[key].length, reverse=True)

    def having(role: Role) -> list[bytes]:
        return [key for key in longest_first if role in points[key].role]

    regular = {points[key].length: key for key in having(Role.REGULAR)}
    kept = {
        *having(Role.SYSTEM),
        *having(Role.TURN)[:TURN_POINTS],
        *(regular[length] for length in thinned(sorted(regular), REGULAR_POINTS)),
    }
    return [key for key in longest_first if key not in kept]


def thinned(lengths: Sequence[int], most: int) -> list[int]:
    """At most `most` of ascending lengths, their gaps growing geometrically away from the end.

    Again and again the length goes whose neighbours lie closest to each other for their distance
    from the end; the last one stays.
    """
    left = list(lengths)
    while len(left) > most:
        end = 2 * left[-1] - left[-2]

        def gap(i: int, end: int = end) -> float:
            before = left[i - 1] if i else 0
            return (left[i + 1] - before) / (end - left[i])

        del left[min(range(len(left) - 1), key=gap)]
    return left
