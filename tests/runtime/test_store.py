"""The local store: what it finds, what it lets go, and that it never mixes bytes up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.properties import examples
from ultraflash.runtime.resume import Kind
from ultraflash.runtime.store import (
    REGULAR_POINTS,
    TURN_POINTS,
    LocalStore,
    Point,
    Role,
    SegmentId,
    thinned,
)

EVERY = 8


def key(text: str, end: int) -> bytes:
    """As prefix keys: equal for texts that begin alike."""
    return blake3(text[:end].encode()).digest()


def segments(text: str, cuts: Sequence[int]) -> list[SegmentId]:
    return [SegmentId(key(text, b), a, b) for a, b in zip([0, *cuts], cuts, strict=False)]


def bytes_of(text: str, segment: SegmentId) -> bytes:
    return f"KV {segment.start} to {segment.end} of {text[: segment.end]}".encode()


def publish(
    store: LocalStore,
    text: str,
    end: int,
    cuts: Sequence[int] = (),
    role: Role = Role.TURN,
    kind: Kind = Kind.FULL,
    data: bytes | None = None,
) -> int:
    """Take a point of a text; how many segments had to be brought."""
    ids = segments(text, [*cuts, end])
    new = {i: bytes_of(text, i) for i in store.missing(ids)}
    point = Point(end, kind, role, data or f"point {text[:end]}".encode())
    store.publish(key(text, end), point, ids, new, {key(text, n) for n in range(1, end)})
    return len(new)


def found(store: LocalStore, text: str, *ends: int) -> int | None:
    """The length that is found among candidates, its bytes checked."""
    hit = store.find([key(text, end) for end in ends])
    if hit is None:
        return None
    end = ends[hit.index]
    assert hit.point.length == end
    assert hit.point.data == f"point {text[:end]}".encode()
    assert hit.segments == tuple(bytes_of(text, i) for i in hit.ids)
    assert [i.start for i in hit.ids] == [0, *(i.end for i in hit.ids[:-1])]
    assert hit.ids[-1].end == end
    return end


# --- finding ---


def test_the_longest_candidate_that_there_is() -> None:
    store = LocalStore(10_000)
    publish(store, "abcdefgh", 3)
    publish(store, "abcdefgh", 6, [3])
    assert found(store, "abcdefgh", 7, 6, 3) == 6
    assert found(store, "abcdXX", 5, 3, 2) == 3
    assert found(store, "Xbcdefgh", 7, 6, 3) is None
    assert found(store, "abcdefgh") is None
    stats = store.stats()
    assert (stats.points, stats.segments, stats.hits, stats.misses) == (2, 2, 2, 2)


def test_conversations_share_what_they_begin_with() -> None:
    store = LocalStore(10_000)
    assert publish(store, "system" + "A" * 10, 16, [6, 8]) == 3
    before = store.stats()
    assert publish(store, "system" + "B" * 10, 16, [6, 8]) == 2  # the first piece is there
    assert publish(store, "system" + "A" * 10, 12, [6, 8]) == 1
    assert store.stats().segments == before.segments + 3


def test_a_full_point_replaces_an_encoder_one_and_not_the_other_way() -> None:
    store = LocalStore(10_000)
    roles = Role(0)
    for kind, role, want in [
        (Kind.ENCODER, Role.REGULAR, Kind.ENCODER),
        (Kind.FULL, Role.TURN, Kind.FULL),
        (Kind.ENCODER, Role.SYSTEM, Kind.FULL),
    ]:
        publish(store, "abcd", 4, role=role, kind=kind, data=kind.encode())
        hit, roles = store.find([key("abcd", 4)]), roles | role
        assert hit is not None
        assert hit.point == Point(4, want, roles, want.encode())
    assert store.stats().points == 1


# --- letting go ---


def test_least_recently_used_goes_first_and_segments_with_their_last_point() -> None:
    texts = ["first conversation", "other conversation", "third conversation"]
    store = LocalStore(10_000)
    publish(store, texts[0], 10, [8])
    one = store.stats().nbytes
    store = LocalStore(2 * one)
    publish(store, texts[0], 10, [8])
    publish(store, texts[1], 10, [8])
    assert found(store, texts[0], 10) == 10  # now the second is the oldest
    publish(store, texts[2], 10, [8])
    assert found(store, texts[1], 10) is None
    assert found(store, texts[0], 10) == 10
    stats = store.stats()
    assert (stats.points, stats.segments, stats.nbytes, stats.evicted) == (2, 4, 2 * one, 1)


def test_a_shared_segment_stays_with_the_point_that_is_left() -> None:
    store = LocalStore(10_000)
    publish(store, "abcdefgh" + "X" * 4, 12, [8])
    used = store.stats().nbytes
    store = LocalStore(used + 40)
    publish(store, "abcdefgh" + "X" * 4, 12, [8])
    publish(store, "abcdefgh" + "Y" * 4, 12, [8])
    assert store.stats().evicted == 1
    assert found(store, "abcdefghYYYY", 12) == 12


def test_what_can_never_fit_is_refused_and_throws_nobody_out() -> None:
    store = LocalStore(120)
    publish(store, "abcdef", 6)
    publish(store, "x" * 90, 90)
    assert store.stats().refused == 1
    assert found(store, "abcdef", 6) == 6


def test_an_eviction_does_not_reach_what_was_found() -> None:
    store = LocalStore(50)
    publish(store, "abcdef", 6)
    hit = store.find([key("abcdef", 6)])
    publish(store, "uvwxyz", 6)
    assert store.stats().evicted == 1
    assert hit is not None
    assert hit.segments == (bytes_of("abcdef", hit.ids[0]),)


def test_kept_of_a_conversation() -> None:
    """The newest turn points, few regular ones that thin out backwards, the system prompt."""
    store, text = LocalStore(10**7), "".join(chr(97 + i % 26) for i in range(500))
    publish(store, text, 5, role=Role.SYSTEM)
    for end in range(EVERY, 480, EVERY):
        publish(store, text, end, [5], Role.REGULAR)
        publish(store, text, end + 1, [5], Role.TURN)
    left = {end for end in range(1, 500) if found(store, text, end)}
    turns = {end for end in left if end % EVERY == 1}
    regular = sorted(end for end in left if end % EVERY == 0)
    assert 5 in left
    assert turns == {473 - EVERY * i for i in range(TURN_POINTS)}
    assert len(regular) == REGULAR_POINTS
    assert regular[-1] == 472
    gaps = [b - a for a, b in pairwise(regular)]
    assert gaps[-1] == EVERY
    assert gaps[0] > 4 * gaps[-1]
    assert store.stats().evicted == 0


def test_a_point_of_two_roles_stays_for_either() -> None:
    store, text = LocalStore(10**6), "z" * 100
    publish(store, text, 8, role=Role.REGULAR | Role.TURN)
    for end in range(9, 20):
        publish(store, text, end)
    assert found(store, text, 8) == 8
    assert found(store, text, 9) is None


def test_other_conversations_are_not_thinned() -> None:
    store = LocalStore(10**6)
    for number in range(20):
        publish(store, f"{number:02} text", 5)
    assert store.stats().points == 20


@examples(100)
@given(st.integers(1, 300), st.integers(1, 20))
def test_thinning_keeps_the_end_and_a_foothold_everywhere(count: int, most: int) -> None:
    lengths = [n * EVERY for n in range(1, count + 1)]
    left = thinned(lengths, most)
    assert left == sorted(set(left) & set(lengths))
    assert len(left) == min(count, most)
    assert left[-1] == lengths[-1]
    assert thinned(left, most) == left


@pytest.mark.parametrize("count", [17, 64, 128])
def test_one_by_one_is_geometric_too(count: int) -> None:
    """Thinned after every new one, as it happens: any depth has a point not much shallower."""
    left: list[int] = []
    for n in range(1, count + 1):
        left = thinned([*left, n], 16)
    end = count + 1
    for depth in range(1, count):
        nearest = max((n for n in left if n <= end - depth), default=0)
        assert end - nearest <= 2.0 * depth + 1, (depth, left)


# --- anything in any order ---


class AnyOrder(RuleBasedStateMachine):
    """Against a plain dictionary that forgets nothing: what is found is right, and no limit is
    ever passed."""

    LIMIT = 400

    def __init__(self) -> None:
        super().__init__()
        self.store = LocalStore(self.LIMIT)
        self.published: set[bytes] = set()

    texts = st.text("ab", min_size=2, max_size=14)

    @rule(text=texts, data=st.data())
    def publish(self, text: str, data: st.DataObject) -> None:
        end = len(text)
        cuts = sorted(data.draw(st.sets(st.integers(1, end - 1), max_size=3)))
        role = data.draw(st.sampled_from([*Role, Role.TURN | Role.REGULAR]))
        publish(self.store, text, end, cuts, role)
        self.published.add(key(text, end))

    @rule(text=texts)
    def find(self, text: str) -> None:
        ends = range(len(text), 0, -1)
        there = [end for end in ends if key(text, end) in self.store._entries]
        end = found(self.store, text, *ends)
        assert end == next(iter(there), None)
        assert end is None or key(text, end) in self.published

    @precondition(lambda self: self.published)
    @rule(text=texts)
    def the_latest_is_there(self, text: str) -> None:
        publish(self.store, text, len(text))
        self.published.add(key(text, len(text)))
        assert found(self.store, text, len(text)) == len(text)

    @invariant()
    def within_limits(self) -> None:
        store = self.store
        assert store.stats().nbytes <= self.LIMIT
        points = sum(len(e.point.data) for e in store._entries.values())
        assert store.stats().nbytes == points + sum(map(len, store._segments.values()))
        needed = {i for e in store._entries.values() for i in e.ids}
        assert needed == set(store._segments)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(examples(25), stateful_step_count=25)
