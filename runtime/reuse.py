"""Between engine and store: what a prompt resumes from, and which points its conversation leaves.

State is addressed by position, so a point need not be taken at the moment its length is reached:
rings keep a window whole until `Layout.reach` rows were written behind it. Prompts are therefore
not cut at every point, only kept from running too far past one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from ultraflash.runtime.backend import Backend, Bytes, Staged
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.content import (
    U64,
    Marks,
    PrefixKeys,
    answer_start,
    content_ids,
    resume_ends,
    system_end,
)
from ultraflash.runtime.errors import SnapshotError
from ultraflash.runtime.resume import Kind, Run, point_kind, resume
from ultraflash.runtime.session import Session
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.store import Point, Role, SegmentId, Store

_log = logging.getLogger(__name__)
LAST_POINT_S = 5e-3  # that the end of an answer waits for its point


@dataclass(slots=True)
class _Trail:
    """What a live conversation has in the store, and what it still has to bring there."""

    store: Store
    keys: PrefixKeys
    run: Run
    due: dict[int, Role] = field(default_factory=dict)  # lengths of points to come, ascending
    chain: list[SegmentId] = field(default_factory=list)
    lineage: set[bytes] = field(default_factory=set)
    newest: int = 0  # length of the latest point, restored or taken


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A point on its way from the device to the store."""

    trail: _Trail
    key: bytes
    length: int
    kind: Kind
    role: Role
    data: Staged
    chain: list[SegmentId]
    segments: dict[SegmentId, Staged]  # that the store lacked, or that points before this one bring

    def wait(self, seconds: float) -> bool:
        """Whether it has arrived, after at most `seconds`."""
        until = time.monotonic() + seconds
        parts = (self.data, *self.segments.values())
        return all(part.wait(max(0.0, until - time.monotonic())) for part in parts)

    def publish(self) -> None:
        """Wait for what has not arrived, and give it to the store."""
        point = Point(self.length, self.kind, self.role, self.data.take())
        new: dict[SegmentId, Bytes] = {i: staged.take() for i, staged in self.segments.items()}
        self.trail.store.publish(self.key, point, self.chain, new, self.trail.lineage)


class Reuse:
    """Finds, restores, takes and publishes points of the engine's sessions."""

    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        store: Store | None,
        fingerprint: str,
        marks: Marks,
        config: RuntimeConfig,
    ) -> None:
        """Without a store every prompt is run from its first token, and nothing is taken."""
        self._layout, self._backend, self._store = layout, backend, store
        self._fingerprint, self._marks = fingerprint, marks
        self._mode, self._tail = config.prefill, config.tail
        self._every = config.segment_tokens
        self._trails: dict[str, _Trail] = {}
        self._leaving: deque[_Leaving] = deque()  # in the order in which they were taken

    def start(self, session: Session) -> Run:
        """Restore the longest usable point of a session's prompt; what to run behind it.

        Points of the same conversation that have not reached the store yet are waited for.
        """
        request = session.request
        fresh = resume(self._mode, self._tail, None, session.prompt_tokens)
        assert fresh is not None, "nothing can be resumed from nothing"
        if self._store is None:
            return fresh
        content = content_ids(request.ids, request.images)
        keys = PrefixKeys(self._fingerprint, request.salt, content)
        ends = resume_ends(content, self._marks, self._every)
        for end in reversed(ends):  # ascending: every id is hashed once
            keys.at(end)
        trail = _Trail(self._store, keys, fresh, lineage={keys.at(end) for end in ends})
        self._restore(session, trail, ends)
        trail.due = self._due(content, trail.newest)
        self._trails[session.key] = trail
        return trail.run

    def room(self, session: Session, rows: int) -> int:
        """How many of the prompt's next `rows` rows may run before a point has to be taken."""
        trail = self._trails.get(session.key)
        first = next((end for end in trail.due if end > session.done), None) if trail else None
        return rows if first is None else min(rows, first + self._layout.reach - session.done)

    def passed(self, session: Session, kind: Kind) -> None:
        """Take the points that the latest rows completed.

        `kind`: encoder when they ran through the encoder alone.
        """
        trail = self._trails.get(session.key)
        if trail is None:
            return
        for end, role in list(trail.due.items()):
            if end <= session.known and self._kind(session, trail, end) is kind:
                del trail.due[end]
                self._take(session, trail, end, role)
                if end > session.prompt_tokens:
                    trail.due[end + self._every] = Role.REGULAR

    def finish(self, session: Session) -> None:
        """The session has ended, for whatever reason: take the point at the end of its answer.

        That is before the token sampled last, which was never processed. The client's next request
        may come at once, so that a short wait makes the point findable first.
        """
        trail = self._trails.get(session.key)
        if trail and session.answering and session.known > trail.newest:
            self._take(session, trail, session.known, Role.TURN)
            self.settle(LAST_POINT_S)

    def forget(self, session: Session) -> None:
        """The session is gone and leaves nothing more."""
        self._trails.pop(session.key, None)

    @property
    def busy(self) -> bool:
        """Whether points are on their way to the store."""
        return bool(self._leaving)

    def settle(self, seconds: float = 0.0) -> None:
        """Hand the store the points that have arrived, after waiting at most `seconds` for all."""
        until = time.monotonic() + seconds
        while self._leaving and self._leaving[0].wait(max(0.0, until - time.monotonic())):
            self._leaving.popleft().publish()

    def _await(self, keys: list[bytes]) -> None:
        """Have the store know the points on their way that could be found under `keys`."""
        wanted = set(keys)
        while any(leaving.key in wanted for leaving in self._leaving):
            self._leaving.popleft().publish()

    def _restore(self, session: Session, trail: _Trail, ends: list[int]) -> None:
        keys = [trail.keys.at(end) for end in ends]
        self._await(keys)
        while hit := trail.store.find(keys):
            end = ends[hit.index]
            ends, keys = ends[hit.index + 1 :], keys[hit.index + 1 :]
            run = resume(self._mode, self._tail, hit.point.kind, session.prompt_tokens - end)
            if run is None:
                continue
            try:
                session.restore(self._layout, self._backend, end, hit.point.data, hit.segments)
            except SnapshotError as error:
                _log.warning("%s: a point of %d tokens is no use: %s", session.key, end, error)
                continue
            trail.run, trail.chain, trail.newest = run, list(hit.ids), end
            return

    def _due(self, content: U64, newest: int) -> dict[int, Role]:
        every, roles = self._every, dict[int, Role]()
        wanted = [(answer_start(content, self._marks), Role.TURN)]
        system = system_end(content, self._marks)
        if system >= self._layout.window:  # a shorter one is sooner run than restored
            wanted.append((system, Role.SYSTEM))
        beyond = (len(content) // every + 1) * every  # the first one that the answer may reach
        wanted += [(end, Role.REGULAR) for end in range(every, beyond + 1, every)]
        for end, role in sorted(wanted, key=lambda w: w[0]):
            if end > newest:
                roles[end] = roles.get(end, role) | role
        return roles

    def _kind(self, session: Session, trail: _Trail, end: int) -> Kind:
        window, reach = self._layout.window, self._layout.reach
        return point_kind(trail.run, session.prompt_tokens, end, window, reach)

    def _take(self, session: Session, trail: _Trail, end: int, role: Role) -> None:
        trail.keys.extend(content_ids(session.ids[trail.keys.length : end]))
        chain = self._chain(trail, end)
        coming = {i: s for leaving in self._leaving for i, s in leaving.segments.items()}
        missing = trail.store.missing(chain)
        new = [i for i in missing if i not in coming]
        kind, ranges = self._kind(session, trail, end), [(i.start, i.end) for i in new]
        data, staged = session.stage(self._layout, self._backend, end, kind, ranges)
        coming |= zip(new, staged, strict=True)
        segments = {i: coming[i] for i in missing}
        key = trail.keys.at(end)
        self._leaving.append(_Leaving(trail, key, end, kind, role, data, chain, segments))
        self.settle()
        trail.chain, trail.newest = chain, end
        trail.lineage.add(key)

    def _chain(self, trail: _Trail, end: int) -> list[SegmentId]:
        """Segments that cover [0, end), cut at multiples of `every` and at this trail's points.

        A stretch of `every` tokens that is complete becomes one segment, so that all conversations
        that begin with it cut it alike; the pieces that older points of it use stay with them.
        """
        chain, every = trail.chain, self._every
        covered = chain[-1].end if chain else 0
        whole = covered // every * every
        if end >= whole + every:
            chain, covered = [i for i in chain if i.end <= whole], whole
        cuts = [covered, *range(whole + every, end, every), end]
        return chain + [SegmentId(trail.keys.at(cut), start, cut) for start, cut in pairwise(cuts)]
