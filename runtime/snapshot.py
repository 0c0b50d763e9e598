"""A conversation's state as bytes: segments of global KV, and restore points with all the rest.

Derived from the model and from the names and row shapes of the state buffers alone, so that a
backend only has to hand over rows by name. Both forms start with a header; payloads have the sizes
of model.md section 5.4. The same prefix gives the same bytes, whatever way led there.

A segment holds entries of positions [start, end), buffer after buffer. A point at length N holds
the last rows before N: W of every window, the token whose pair is not complete, the ids that the
next n-grams reach back to.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3

from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Ref
from ultraflash.runtime.backend import Backend, Bytes, Rows
from ultraflash.runtime.errors import SnapshotError
from ultraflash.runtime.resume import Kind

VERSION = 1  # of headers and payloads; part of the fingerprint

_LAYER = re.compile(r"L(?P<layer>\d+)\.attn\.(?P<what>ring|main|key|pending)_\w+")
_DRAFT_WINDOW = re.compile(r"draft\.stage\d+\.ring_\w+")
_HISTORY = "engram.history"
# Rewritten by every prefill before anybody reads it.
_TRANSIENT = re.compile(r"draft\.q|replay\..+|next\..+")

_DTYPES: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("u1"),
    "i32": np.dtype("<i4"),
    "f32": np.dtype("<f4"),
}
_HEADER = struct.Struct("<4s2H3Q16s")  # magic, version, kind, start, end, payload bytes, layout
_SEGMENT, _POINT = b"UFsg", b"UFpt"
_KINDS = {Kind.FULL: 1, Kind.ENCODER: 2}


@dataclass(frozen=True, slots=True)
class _Header:
    kind: int
    start: int
    end: int
    payload: int


@dataclass(frozen=True)
class Layout:
    """Which rows of which state buffers leave, and in which order."""

    window: int
    ring: int  # rows of every ring
    entries: tuple[tuple[Ref, int], ...]  # global KV, with the tokens of an entry
    encoder_windows: tuple[Ref, ...]
    decoder_windows: tuple[Ref, ...]
    pending: tuple[Ref, ...]
    history: Ref | None
    history_rows: int

    @classmethod
    def of(cls, model: Model, state: Iterable[Ref], decoder_start: int | None = None) -> Layout:
        """From a model and the state buffers of its decode plan.

        `decoder_start`: first layer without state in points of kind encoder, the one that a replay
        starts with; None: the model's own.

        Raises:
            SnapshotError: for a state buffer of unknown name: what it means to a snapshot has to
                be said here.
        """
        start = model.decoder_start if decoder_start is None else decoder_start
        found: dict[str, list[Ref]] = {
            n: [] for n in ("entries", "encoder", "decoder", "pending", "history")
        }
        for ref in state:
            if group := _group(ref, start):
                found[group].append(ref)
        windows = found["encoder"] + found["decoder"]
        return cls(
            window=model.window,
            ring=windows[0].shape[1],
            entries=tuple((ref, model.ratio(_layer(ref))) for ref in found["entries"]),
            encoder_windows=tuple(found["encoder"]),
            decoder_windows=tuple(found["decoder"]),
            pending=tuple(found["pending"]),
            history=next(iter(found["history"]), None),
            history_rows=model.engram_max_order - 1,
        )

    @property
    def reach(self) -> int:
        """Rows that may have been written behind a length whose point is still to be taken."""
        return self.ring - self.window

    @cached_property
    def digest(self) -> bytes:
        """Equal for layouts that read each other's bytes."""
        lines = [f"{VERSION} {self.window} {self.history_rows}"]
        refs = [*self.encoder_windows, "|", *self.decoder_windows, *self.pending, self.history]
        lines += [f"{ref.name} {_row_bytes(ref)} {ratio}" for ref, ratio in self.entries]
        lines += [f"{r.name} {_row_bytes(r)}" if isinstance(r, Ref) else str(r) for r in refs]
        return blake3("\n".join(lines).encode()).digest(length=16)

    def segment_bytes(self, start: int, end: int) -> int:
        """Payload of a segment: entries of groups that are complete at `end` but not at `start`."""
        sizes = self._row_bytes
        return sum(sizes[ref.name] * (end // r - start // r) for ref, r in self.entries)

    def point_bytes(self, length: int, kind: Kind) -> int:
        """Payload of a point."""
        sizes = self._row_bytes
        return sum(sizes[ref.name] * rows for ref, rows in self._point_rows(length, kind))

    @cached_property
    def _row_bytes(self) -> dict[str, int]:
        refs = [ref for ref, _ in self.entries] + [*self.encoder_windows, *self.decoder_windows]
        refs += [*self.pending, *([self.history] if self.history else [])]
        return {ref.name: _row_bytes(ref) for ref in refs}

    def segment(self, start: int, end: int) -> tuple[bytes, list[Rows]]:
        """Global KV of positions [start, end), of a slot that has processed them: what
        `Backend.stage` takes.
        """
        head = self._head(_SEGMENT, 0, start, end, self.segment_bytes(start, end))
        return head, self._segment_rows(start, end)

    def point(self, length: int, kind: Kind) -> tuple[bytes, list[Rows]]:
        """Everything else that a conversation of `length` tokens needs; at most `reach` rows may
        have been processed behind them when it is staged.
        """
        head = self._head(_POINT, _KINDS[kind], 0, length, self.point_bytes(length, kind))
        return head, self._point_spans(length, kind)

    def export_segment(self, backend: Backend, slot: int, start: int, end: int) -> Bytes:
        """A segment, waited for."""
        return backend.stage(slot, [self.segment(start, end)])[0].take()

    def export_point(self, backend: Backend, slot: int, length: int, kind: Kind) -> Bytes:
        """A point, waited for."""
        return backend.stage(slot, [self.point(length, kind)])[0].take()

    def restore(
        self, backend: Backend, slot: int, length: int, point: Bytes, segments: Sequence[Bytes]
    ) -> Kind:
        """Put a conversation of `length` tokens into a slot; what the point was.

        `segments` follow each other from position 0; the last may go farther than `length`.
        Nothing is written unless all of it fits.

        Raises:
            SnapshotError: bytes of another version, layout, size or range.
        """
        kind = self._check_point(point, length)
        headers = self._check_segments(segments, length)
        parts = [(self._point_spans(length, kind), memoryview(point)[_HEADER.size :])]
        for data, header in zip(segments, headers, strict=True):
            parts += self._segment_parts(data, header, length)
        backend.restore(slot, parts)
        return kind

    def _segment_parts(
        self, data: Bytes, header: _Header, length: int
    ) -> Iterator[tuple[list[Rows], memoryview]]:
        """What a segment holds of the first `length` positions."""
        left = memoryview(data)[_HEADER.size :]
        if header.end <= length:
            yield self._segment_rows(header.start, header.end), left
            return
        for ref, ratio in self.entries:
            size, first = self._row_bytes[ref.name], header.start // ratio
            used = max(first, length // ratio)
            yield [Rows(ref.name, first, used)], left[: (used - first) * size]
            left = left[(header.end // ratio - first) * size :]

    def _segment_rows(self, start: int, end: int) -> list[Rows]:
        return [Rows(ref.name, start // ratio, end // ratio) for ref, ratio in self.entries]

    def _point_spans(self, length: int, kind: Kind) -> list[Rows]:
        """`_point_rows`, as stretches of their rings."""
        return [
            Rows(ref.name, *span)
            for ref, rows in self._point_rows(length, kind)
            for span in _spans(length, rows, ref.shape[1])
        ]

    def _point_rows(self, length: int, kind: Kind) -> Iterator[tuple[Ref, int]]:
        """(ring, how many of the last rows before `length`)."""
        window = min(length, self.window)
        full = kind is Kind.FULL
        for ref in self.encoder_windows + (self.decoder_windows if full else ()):
            yield ref, window
        for ref in self.pending:
            yield ref, length % 2
        if self.history:
            yield self.history, min(length, self.history_rows)

    def _head(self, magic: bytes, kind: int, start: int, end: int, payload: int) -> bytes:
        return _HEADER.pack(magic, VERSION, kind, start, end, payload, self.digest)

    def _check_point(self, point: Bytes, length: int) -> Kind:
        header = self._read_header(point, _POINT, "point")
        kind = next((k for k, number in _KINDS.items() if number == header.kind), None)
        if kind is None:
            raise SnapshotError(f"a point of kind {header.kind} is unknown: known are 1 and 2")
        if (header.start, header.end) != (0, length):
            raise SnapshotError(f"a point of {header.end} tokens cannot restore {length}")
        _check_size("point", header.payload, self.point_bytes(length, kind))
        return kind

    def _check_segments(self, segments: Sequence[Bytes], length: int) -> list[_Header]:
        headers = [self._read_header(data, _SEGMENT, "segment") for data in segments]
        at = 0
        for header in headers:
            if header.start != at or header.end <= at:
                raise SnapshotError(
                    f"a segment of positions {header.start} to {header.end} cannot follow {at}"
                )
            _check_size("segment", header.payload, self.segment_bytes(header.start, header.end))
            at = header.end
        if at < length:
            raise SnapshotError(f"segments end at {at}, {length} positions are to be restored")
        return headers

    def _read_header(self, data: Bytes, magic: bytes, what: str) -> _Header:
        if len(data) < _HEADER.size:
            raise SnapshotError(f"{len(data)} bytes are no {what}: its header has {_HEADER.size}")
        found, version, kind, start, end, payload, layout = _HEADER.unpack_from(data)
        if (found, version) != (magic, VERSION):
            raise SnapshotError(
                f"{found!r} version {version} is no {what} of version {VERSION}: "
                f"drop it, prefill makes a new one"
            )
        if layout != self.digest:
            raise SnapshotError(f"this {what} has another layout: it was made for another model")
        _check_size(what, len(data) - _HEADER.size, payload)
        return _Header(kind, start, end, payload)


def _group(ref: Ref, decoder_start: int) -> str | None:
    """Which field of `Layout` a state buffer belongs to, None if it need not leave."""
    if _TRANSIENT.fullmatch(ref.name):
        return None
    match = _LAYER.fullmatch(ref.name)
    groups = {"main": "entries", "key": "entries", "pending": "pending"}
    group = "history" if ref.name == _HISTORY else None
    if match and match["what"] == "ring":
        group = "encoder" if int(match["layer"]) < decoder_start else "decoder"
    elif match:
        group = groups[match["what"]]
    elif _DRAFT_WINDOW.fullmatch(ref.name):
        group = "decoder"
    if group is None or ref.dtype not in _DTYPES:
        raise SnapshotError(f"state buffer {ref} is unknown to snapshots: say here what it is")
    return group


def _layer(ref: Ref) -> int:
    match = _LAYER.fullmatch(ref.name)
    assert match
    return int(match["layer"])


def _row_bytes(ref: Ref) -> int:
    return prod(ref.shape[2:]) * _DTYPES[ref.dtype].itemsize


def _spans(length: int, rows: int, ring: int) -> list[tuple[int, int]]:
    """Where the last `rows` positions before `length` lie in a ring: one stretch, or two."""
    if not rows:
        return []
    first = (length - rows) % ring
    end = first + rows
    return [(first, end)] if end <= ring else [(first, ring), (0, end - ring)]


def _check_size(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise SnapshotError(f"this {what} has {found} bytes behind its header, not {expected}")
