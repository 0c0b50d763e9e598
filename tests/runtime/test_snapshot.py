"""State as bytes: its size, what is refused, and that a conversation goes on as if nothing was.

tiny-a has a window of 16 and rings of 64; lengths up to 151 wrap the rings and pass top-k and pool.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.compare import assert_same_bits
from helpers.desk import TINY, Desk, Outcome, some_ids
from helpers.properties import examples
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Life, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array, Bytes
from ultraflash.runtime.errors import SnapshotError
from ultraflash.runtime.probe import Probe
from ultraflash.runtime.resume import Kind
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.step_io import Draw, Part

IDS, WRONG = some_ids(0, 160), some_ids(1, 160)
LENGTHS = [1, 2, 3, 15, 16, 17, 32, 33, 63, 64, 65, 100, 101]  # odd and even, around every limit
NEVER_STOPPED, KEPT, OTHER, KEPT2, OTHER2 = range(5)  # slots
SEGMENT = 32
HEADER = 48


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


@cache
def single_shot(desk: Desk) -> Array:
    """Logits of every row, from one call over all ids."""
    return desk.extend(NEVER_STOPPED, 0, IDS).logits


def cut(length: int, every: int = SEGMENT) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, length, every), length]))


def export(
    desk: Desk, slot: int, length: int, kind: Kind = Kind.FULL, every: int = SEGMENT
) -> tuple[Bytes, list[Bytes]]:
    """A point and the segments up to it: every byte of state that matters at this length."""
    layout, backend = desk.layout, desk.backend
    segments = [layout.export_segment(backend, slot, *span) for span in cut(length, every)]
    return layout.export_point(backend, slot, length, kind), segments


def move(desk: Desk, source: int, target: int, length: int, kind: Kind = Kind.FULL) -> None:
    """Into a slot that a stranger used before."""
    desk.scramble(target)
    found = desk.layout.restore(desk.backend, target, length, *export(desk, source, length, kind))
    assert found is kind


def state_of(desk: Desk, slot: int, rank: int = 0) -> dict[str, Array]:
    refs = desk.runner(1, 1).plan.of_life(Life.STATE)
    return {ref.name: desk.backend.state(ref, rank)[slot].copy() for ref in refs}


def assert_equal_outcomes(a: Outcome, b: Outcome) -> None:
    assert_same_bits(a.logits, b.logits)
    assert_same_bits(a.confidence, b.confidence)
    assert (a.accepted, a.token, a.drafts) == (b.accepted, b.token, b.drafts)


# --- sizes, from names alone (model.md 5.4) ---


@cache
def release_layout(decoder_start: int | None = None) -> Layout:
    model = release_model()
    build = Build(model, Capacity(2, model.max_position), block=model.draft_block)
    state = build_decode(build, 1, 1).of_life(Life.STATE)
    return Layout.of(model, state, decoder_start)


def test_sizes_of_the_released_model() -> None:
    layout = release_layout()
    assert layout.segment_bytes(0, 8192) == 890 * 8192 == 7_290_880
    assert layout.segment_bytes(0, 100_000) == 89_000_000
    # A token whose pair is incomplete has no entry yet in the three layers of ratio 2.
    assert layout.segment_bytes(0, 100_001) == 890 * 100_001 - 3 * (288 + 68) // 2
    windows, drafts, pending, history = 2_703_360, 202_752, 12_288, 3 * 4
    assert layout.point_bytes(100_000, Kind.FULL) == windows + drafts + history
    assert layout.point_bytes(100_001, Kind.FULL) == windows + drafts + pending + history
    assert layout.point_bytes(8192, Kind.ENCODER) == windows // 2 + history == 1_351_692
    assert layout.reach >= 32


def test_an_encoder_point_of_ced21_has_the_window_of_layer_20() -> None:
    assert release_layout(21).point_bytes(8192, Kind.ENCODER) == 1_351_692 + 67_584
    assert release_layout(21).point_bytes(8192, Kind.FULL) == 2_906_124


@examples(50)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=8))
def test_segments_of_any_cut_add_up(lengths: list[int]) -> None:
    layout, cuts = release_layout(), [0, *np.cumsum(lengths).tolist()]
    parts = sum(layout.segment_bytes(a, b) for a, b in pairwise(cuts))
    assert parts == layout.segment_bytes(0, cuts[-1])


def test_a_state_buffer_that_nobody_explained_is_an_error() -> None:
    model = release_model()
    for name in ("L3.attn.sums", "L3.ffn.ring_codes", "mtp.0.ring"):
        with pytest.raises(SnapshotError, match=f"state buffer {name}.* is unknown to snapshots"):
            Layout.of(model, [Ref(name, (2, 256, 512), "u8", Life.STATE)])
    with pytest.raises(SnapshotError, match="unknown"):  # nor one whose bytes differ by backend
        Layout.of(model, [Ref("L3.attn.ring_codes", (2, 256, 512), "bf16", Life.STATE)])


def test_bytes_have_the_sizes_that_were_announced(desk: Desk) -> None:
    desk.extend(KEPT, 0, IDS[:65])
    for length in (1, 15, 16, 64, 65):
        for kind in Kind:
            point, segments = export(desk, KEPT, length, kind)
            assert len(point) - HEADER == desk.layout.point_bytes(length, kind)
            for data, span in zip(segments, cut(length), strict=True):
                assert len(data) - HEADER == desk.layout.segment_bytes(*span)


# --- going on elsewhere ---


@pytest.mark.parametrize("length", LENGTHS)
def test_it_goes_on_in_another_slot(desk: Desk, length: int) -> None:
    """Fifty more rows after rejected ones, beside the one that never moved, in a used slot."""
    want = single_shot(desk)
    desk.extend(KEPT, 0, IDS[:length])
    desk.extend(KEPT, length, WRONG[:7])
    move(desk, KEPT, OTHER, length)
    more = min(50, len(IDS) - length)
    parts = [Part(slot, length, IDS[length : length + more]) for slot in (KEPT, OTHER)]
    stayed, moved = desk.step(*parts)
    assert_equal_outcomes(moved, stayed)
    assert_same_bits(moved.logits, want[length : length + more])
    assert export(desk, OTHER, length + more) == export(desk, KEPT, length + more)


def test_token_by_token_with_drafts(desk: Desk) -> None:
    """As decoding runs: the token sampled last and three drafts, at an odd and an even length."""
    pairs = {41: (KEPT, OTHER), 70: (KEPT2, OTHER2)}
    rows: dict[int, list[int]] = {}
    for length, (stays, moves) in pairs.items():
        first = desk.extend(stays, 0, IDS[:length])
        move(desk, stays, moves, length)
        # No drafts yet: what they would be drawn from does not travel, a prefill makes new ones.
        rows[length] = [first.token]
    at = {length: length for length in pairs}
    step = 0
    while min(at[length] - length for length in pairs) < 50:
        step += 1
        draw = Draw(temperature=0.8, top_p=0.95, seed=5, step=step)
        parts = [Part(s, at[n], rows[n], draw) for n, slots in pairs.items() for s in slots]
        outcomes = desk.step(*parts)
        for number, length in enumerate(pairs):
            stayed, moved = outcomes[2 * number : 2 * number + 2]
            assert_equal_outcomes(moved, stayed)
            at[length] += 1 + stayed.accepted
            rows[length] = [stayed.token, *stayed.drafts[:3]]
    for length, (stays, moves) in pairs.items():
        assert export(desk, moves, at[length]) == export(desk, stays, at[length])


def test_an_encoder_point_leaves_the_decoder_alone(desk: Desk) -> None:
    length, layout = 77, desk.layout
    desk.extend(KEPT, 0, IDS[:length])
    desk.scramble(OTHER)
    before = state_of(desk, OTHER)
    move(desk, KEPT, OTHER, length, Kind.ENCODER)  # scrambled as before
    assert export(desk, OTHER, length, Kind.ENCODER) == export(desk, KEPT, length, Kind.ENCODER)
    after = state_of(desk, OTHER)
    for ref in layout.decoder_windows:
        assert_same_bits(after[ref.name], before[ref.name])
    assert {ref.name.split(".")[0] for ref in layout.decoder_windows} == {
        "L6",
        "L7",
        "L8",
        "L9",
    } | {"draft"}
    changed = [
        ref.name for ref in layout.encoder_windows if (after[ref.name] != before[ref.name]).any()
    ]
    assert len(changed) >= len(layout.encoder_windows) // 2


@examples(12)
@given(data=st.data(), length=st.integers(1, 140))
def test_where_segments_are_cut_does_not_matter(
    desk: Desk, data: st.DataObject, length: int
) -> None:
    single_shot(desk)  # all 160 rows are in this slot; entries reach back to the first
    cuts = sorted(data.draw(st.sets(st.integers(1, 159), max_size=5)) | {length, 160})
    layout, backend = desk.layout, desk.backend
    spans = [(a, b) for a, b in pairwise([0, *cuts]) if a < length]
    if data.draw(st.booleans()):  # the last may go farther than the length
        spans = [*spans[:-1], (spans[-1][0], data.draw(st.integers(length, 160)))]
    segments = [layout.export_segment(backend, NEVER_STOPPED, *span) for span in spans]
    desk.scramble(OTHER)
    layout.restore(backend, OTHER, length, export(desk, NEVER_STOPPED, length)[0], segments)
    assert export(desk, OTHER, length)[1] == export(desk, NEVER_STOPPED, length)[1]


def test_the_same_prefix_gives_the_same_bytes(desk: Desk) -> None:
    """In one call, in pieces, or token by token after rejected drafts."""
    for length in (30, 65):
        desk.extend(KEPT, 0, IDS[:length])
        for at, end in pairwise([0, 13, 14, 29, 30, 65]):
            if end <= length:
                desk.extend(OTHER, at, IDS[at:end])
                desk.extend(OTHER, end, WRONG[:5])
        assert export(desk, OTHER, length) == export(desk, KEPT, length)


def test_all_ranks_get_the_same() -> None:
    desk, length = Desk(world=2, slots=3), 67
    desk.extend(0, 0, IDS[:length])
    move(desk, 0, 1, length)
    stayed, moved = desk.step(*[Part(s, length, IDS[length : length + 20]) for s in (0, 1)])
    assert_equal_outcomes(moved, stayed)
    for name, array in state_of(desk, 1, rank=1).items():
        if name != "draft.q":
            assert_same_bits(array, state_of(desk, 1, rank=0)[name])


def test_a_probe_leaves_and_comes_back() -> None:
    """The same through the door that golden comparers use."""
    probe = Probe.open(TINY, max_seq=128)
    state, _ = probe.prefill(IDS[:67])
    snapshot = probe.snapshot(state)
    want = probe.extend(state, IDS[67:80])
    for _ in range(4):  # every slot has been somebody else's since
        probe.prefill(WRONG[:90])
    assert_same_bits(probe.extend(probe.restore(snapshot), IDS[67:80]), want)


# --- rollback ---


@pytest.mark.parametrize("start", [60, 61], ids=["even", "odd"])
def test_rollback_for_every_acceptance_length(desk: Desk, start: int) -> None:
    """A token and seven drafts of which the first few were right: the length tells the rest."""
    want = single_shot(desk)
    desk.extend(KEPT2, 0, IDS[:start])
    kept: dict[int, tuple[Bytes, list[Bytes]]] = {}
    for at in range(start, start + 8):
        desk.extend(KEPT2, at, IDS[at : at + 1])
        kept[at + 1] = export(desk, KEPT2, at + 1)
    desk.extend(KEPT, 0, IDS[:start])
    for right in range(8):
        length = start + 1 + right
        desk.extend(KEPT, start, IDS[start:length] + WRONG[: 7 - right])
        assert export(desk, KEPT, length) == kept[length], f"{right} accepted"
        move(desk, KEPT, OTHER, length)
        parts = [Part(slot, length, IDS[length : length + 4]) for slot in (KEPT, OTHER)]
        for outcome in desk.step(*parts):
            assert_same_bits(outcome.logits, want[length : length + 4])


# --- what is refused ---


@cache
def sample(desk: Desk) -> tuple[Bytes, tuple[Bytes, ...]]:
    desk.extend(KEPT, 0, IDS[:65])
    point, segments = export(desk, KEPT, 65)
    return point, tuple(segments)


def assert_refused(
    desk: Desk, point: Bytes, segments: Sequence[Bytes], length: int, why: str | None = None
) -> None:
    before = state_of(desk, OTHER)
    with pytest.raises(SnapshotError, match=why):
        desk.layout.restore(desk.backend, OTHER, length, point, segments)
    for name, array in state_of(desk, OTHER).items():
        assert_same_bits(array, before[name])


def test_what_does_not_fit_is_refused_and_nothing_is_written(desk: Desk) -> None:
    point, segments = sample(desk)
    a, b, c = segments
    export64 = export(desk, KEPT, 64)[0]
    assert_refused(desk, export64, segments, 65, "a point of 64 tokens cannot restore 65")
    assert_refused(desk, point, [a, b], 65, "segments end at 64, 65 positions")
    assert_refused(desk, point, [a, c], 65, "positions 64 to 65 cannot follow 32")
    assert_refused(desk, point, [b, c], 65, "cannot follow 0")
    assert_refused(desk, point, [a, b, b], 65, "cannot follow 64")
    assert_refused(desk, point, [], 65, "segments end at 0")
    assert_refused(desk, a, segments, 65, "no point of version 1")
    assert_refused(desk, point, [point, b, c], 65, "no segment of version 1")
    assert_refused(desk, b"", segments, 65, "0 bytes are no point")
    assert_refused(desk, point[:-1], segments, 65, "bytes behind its header, not")
    assert_refused(desk, point, [a, bytes(b) + b"\0", c], 65, "bytes behind its header, not")


def test_other_versions_kinds_layouts_and_sizes_are_refused(desk: Desk) -> None:
    point, segments = sample(desk)

    def with_header(data: Bytes, at: int, form: str, value: int | bytes) -> bytes:
        changed = bytearray(data)
        struct.pack_into(form, changed, at, value)
        return bytes(changed)

    changes: list[tuple[int, str, int | bytes, str]] = [
        (4, "<H", 2, "version 2 is no"),
        (32, "16s", bytes(16), "another layout"),
    ]
    for at, form, value, why in changes:
        assert_refused(desk, with_header(point, at, form, value), segments, 65, why)
        broken = [with_header(segments[0], at, form, value), *segments[1:]]
        assert_refused(desk, point, broken, 65, why)
    assert_refused(desk, with_header(point, 6, "<H", 9), segments, 65, "kind 9 is unknown")
    # The header says encoder, the payload is full.
    assert_refused(desk, with_header(point, 6, "<H", 2), segments, 65, "bytes behind its header")


@examples(60)
@given(data=st.data())
def test_no_cut_or_changed_header_gets_through(desk: Desk, data: st.DataObject) -> None:
    point, segments = sample(desk)
    parts = [bytes(part) for part in (point, *segments)]
    which = data.draw(st.integers(0, len(parts) - 1))
    if data.draw(st.booleans()):
        parts[which] = parts[which][: data.draw(st.integers(0, len(parts[which]) - 1))]
    else:
        # Bytes 6 and 7 of a segment say nothing.
        at = data.draw(st.integers(0, HEADER - 1).filter(lambda n: which == 0 or n not in (6, 7)))
        flipped = parts[which][at] ^ data.draw(st.integers(1, 255))
        parts[which] = parts[which][:at] + bytes([flipped]) + parts[which][at + 1 :]
    assert_refused(desk, parts[0], parts[1:], 65)
