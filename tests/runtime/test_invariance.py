"""One sequence gives the same bits however it is cut, whoever sits beside it, whatever was there.

The yardstick is always one call over all tokens at once, in a plan that they fill, in a clean slot.
tiny-a has a window of 16, rings of 64, top-8 of entries and a pool of 16: lengths up to 150 go
past all of them, wrap the rings and leave chunks longer than a ring.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from helpers.rig import TINY, Rig, assert_bits, assert_same_bits
from ultraflash.graphs.capacity import MAX_ROWS
from ultraflash.runtime.backend import Array
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.probe import Probe
from ultraflash.runtime.step_io import Part

LONGEST = 150
# Fixed examples: CI and a desk see the same ones, and a rare rounding tie cannot come and go. They
# are small enough as they are: to shrink a failure takes minutes.
fixed = settings(
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
both_roundings = pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16"])
# Where something changes: window 16, top-8 of pairs and of singles, the pool of 16, rings of 64.
EDGES = [1, 2, 8, 9, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 63, 64, 65, 66, 127, 128, 129]
lengths = st.one_of(st.sampled_from(EDGES), st.integers(1, 130))
YARDSTICK, SLOT, OTHERS = 0, 1, (2, 3, 4)  # slots


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


def some_ids(number: int, count: int = LONGEST) -> list[int]:
    """The first ids of a sequence by its number."""
    ids: list[int] = np.random.default_rng(number).integers(0, 512, LONGEST).tolist()
    return ids[:count]


IDS = some_ids(0)


@dataclass(frozen=True)
class Yardstick:
    """Logits of every row, and the live state behind the last one."""

    logits: Array
    state: dict[str, Array]


@lru_cache(maxsize=128)
def yardstick(rig: Rig, length: int, rounded: bool, number: int = 0) -> Yardstick:
    """One call over the first `length` ids of a sequence, in a slot that was zeroed."""
    rig.backend.clear_slot(YARDSTICK)
    logits = rig.extend(YARDSTICK, 0, some_ids(number, length), rounded)
    return Yardstick(logits, rig.live(YARDSTICK, length))


# --- how a sequence is cut ---


@both_roundings
@settings(fixed, max_examples=12)
@given(cuts=st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_any_split_is_the_single_shot(rig: Rig, rounded: bool, cuts: list[int]) -> None:
    ends = np.minimum(np.cumsum(cuts), LONGEST).tolist()
    want = yardstick(rig, ends[-1], rounded)
    logits, done = [], 0
    for end in ends:
        if end > done:
            logits.append(rig.extend(SLOT, done, IDS[done:end], rounded))
        done = end
    assert_bits(np.concatenate(logits), want.logits, f"logits of {ends}")
    assert_same_bits(rig.live(SLOT, done), want.state, f"split at {ends}")


@both_roundings
def test_token_by_token_is_the_single_shot(rig: Rig, rounded: bool) -> None:
    rows = []
    for position, token in enumerate(IDS):
        rows.append(rig.extend(SLOT, position, [token], rounded))
        if position + 1 in EDGES[1::4]:
            want = yardstick(rig, position + 1, rounded)
            assert_bits(np.concatenate(rows), want.logits, f"logits up to {position}")
            assert_same_bits(rig.live(SLOT, position + 1), want.state, f"after {position}")
    assert_bits(np.concatenate(rows), yardstick(rig, LONGEST, rounded).logits, "logits")


@both_roundings
@settings(fixed, max_examples=10)
@given(
    chunks=st.lists(
        st.tuples(st.sampled_from([5, 16, 70, 128]), st.integers(1, 128)), min_size=1, max_size=4
    )
)
def test_padded_prefill_chunks(rig: Rig, rounded: bool, chunks: list[tuple[int, int]]) -> None:
    """As the engine prefills: plans of fixed width, of which the last rows may be idle."""
    done = 0
    for rows, wanted in chunks:
        end = min(done + min(rows, wanted), LONGEST)
        if end == done:
            break
        logits = rig.prefill_chunk(SLOT, done, IDS[done:end], rows, rounded)
        want = yardstick(rig, end, rounded)
        assert_bits(logits, want.logits[-1], f"{end - done} of {rows} rows up to {end}")
        assert_same_bits(
            rig.live(SLOT, end), want.state, f"{end - done} of {rows} rows up to {end}"
        )
        done = end


def test_idle_rows_touch_no_slot(rig: Rig) -> None:
    for slot in range(rig.capacity.slots):  # the last one is what a slot of -1 would hit
        rig.extend(slot, 0, some_ids(slot, 20))
    rig.extend(SLOT, 0, IDS[:20])
    before = {name: array.copy() for name, array in rig.state().items()}
    rig.step([Part(SLOT, 20, IDS[20:21])], rows=8, sequences=4)
    rig.prefill_chunk(SLOT, 21, IDS[21:23], 16)
    for name, array in rig.state().items():
        others = np.delete(np.arange(len(array)), SLOT)
        assert_bits(array[others], before[name][others], name)


# --- who sits beside it ---


@both_roundings
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_plans_of_any_width(rig: Rig, rounded: bool, count: int) -> None:
    """The same rows at the end of the same prompt, in every plan from `count` rows up to 8."""
    start = 41
    want = yardstick(rig, start + count, rounded)
    for rows in range(count, 9):
        rig.extend(SLOT, 0, IDS[:start], rounded)
        ids = IDS[start : start + count]
        (logits,) = rig.step([Part(SLOT, start, ids)], rows, 1 + rows % 3, rounded)
        assert_bits(logits, want.logits[start:], f"{count} of {rows} rows")
        assert_same_bits(rig.live(SLOT, start + count), want.state, f"{count} of {rows} rows")


others_beside = st.lists(
    st.tuples(st.integers(1, 10**6), st.integers(0, 90), st.integers(1, 4)), max_size=3
)


@both_roundings
@settings(fixed, max_examples=20)
@given(data=st.data(), start=st.one_of(st.just(0), lengths), count=st.integers(1, 4))
def test_neighbours_do_not_matter(
    rig: Rig, rounded: bool, data: st.DataObject, start: int, count: int
) -> None:
    """Beside 0 to 3 other sequences of any contents, length, order and slots; ragged, some idle."""
    others = data.draw(others_beside)
    slots = data.draw(st.permutations([SLOT, *OTHERS]))
    want = yardstick(rig, start + count, rounded)
    parts = []
    for slot, (number, length, more) in zip(slots[1:], others, strict=False):
        ids = some_ids(number, length + more)
        if length:
            rig.extend(slot, 0, ids[:length], rounded)
        parts.append(Part(slot, length, ids[length:]))
    slot = slots[0]
    if start:
        rig.extend(slot, 0, IDS[:start], rounded)
    place = data.draw(st.integers(0, len(parts)))
    parts.insert(place, Part(slot, start, IDS[start : start + count]))
    used = sum(len(part.ids) for part in parts)
    rows = used + data.draw(st.integers(0, 3))
    sequences = len(parts) + data.draw(st.integers(0, 2))
    logits = rig.step(parts, rows, sequences, rounded)[place]
    assert_bits(logits, want.logits[start:], f"{parts} in {rows} rows of {sequences}")
    assert_same_bits(rig.live(slot, start + count), want.state, f"{parts}")


@both_roundings
def test_neighbours_along_a_whole_conversation(rig: Rig, rounded: bool) -> None:
    """Forty steps of four sequences that start at different lengths: each as if it were alone."""
    starts, steps = {1: 1, 2: 14, 3: 40, 4: 61}, 40
    ids = {slot: some_ids(slot, start + steps) for slot, start in starts.items()}
    rows: dict[int, list[Array]] = {slot: [] for slot in starts}
    for slot, start in starts.items():
        rig.extend(slot, 0, ids[slot][:start], rounded)
    for step in range(steps):
        order = np.random.default_rng(step).permutation(list(starts)).tolist()
        parts = [Part(s, starts[s] + step, [ids[s][starts[s] + step]]) for s in order]
        for slot, logits in zip(order, rig.step(parts, rounded=rounded), strict=True):
            rows[slot].append(logits)
    for slot, start in starts.items():
        want = yardstick(rig, start + steps, rounded, slot)
        assert_bits(np.concatenate(rows[slot]), want.logits[start:], f"sequence {slot}")
        assert_same_bits(rig.live(slot, start + steps), want.state, f"sequence {slot}")


# --- what was there before ---


@both_roundings
@settings(fixed, max_examples=10)
@given(before=st.integers(1, LONGEST), number=st.integers(1, 99), length=lengths)
def test_a_used_slot_is_as_good_as_new(
    rig: Rig, rounded: bool, before: int, number: int, length: int
) -> None:
    rig.extend(SLOT, 0, some_ids(number, before), rounded)
    want = yardstick(rig, length, rounded)
    half = length // 2
    logits = [rig.extend(SLOT, 0, IDS[:half], rounded)] if half else []
    logits.append(rig.extend(SLOT, half, IDS[half:length], rounded))
    assert_bits(np.concatenate(logits), want.logits, f"{length} after {before}")
    assert_same_bits(rig.live(SLOT, length), want.state, f"{length} after {before}")


@both_roundings
@settings(fixed, max_examples=20)
@given(
    kept=lengths,
    rejected=st.integers(1, 2 * MAX_ROWS),
    at_once=st.integers(1, MAX_ROWS),
    more=st.integers(1, 20),
)
def test_rollback_is_only_a_number(
    rig: Rig, rounded: bool, kept: int, rejected: int, at_once: int, more: int
) -> None:
    """Rejected rows leave nothing behind, up to the two steps of them that rings allow for."""
    rig.extend(SLOT, 0, IDS[:kept], rounded)
    wrong = some_ids(7, rejected)
    for first in range(0, rejected, at_once):
        rig.extend(SLOT, kept + first, wrong[first : first + at_once], rounded)
    before = yardstick(rig, kept, rounded).state
    assert_same_bits(rig.live(SLOT, kept), before, f"{kept} kept of {kept + rejected}")
    want = yardstick(rig, kept + more, rounded)
    logits = rig.extend(SLOT, kept, IDS[kept : kept + more], rounded)
    assert_bits(logits, want.logits[kept:], f"{kept} kept of {kept + rejected}, then {more}")
    assert_same_bits(rig.live(SLOT, kept + more), want.state, f"{kept}+{more} after {rejected}")


@both_roundings
@settings(fixed, max_examples=8)
@given(
    start=st.one_of(st.sampled_from([1, 2, 15, 60, 61]), st.integers(1, 70)),
    blocks=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=3, max_size=14),
)
def test_verified_blocks_are_plain_decoding(
    rig: Rig, rounded: bool, start: int, blocks: list[tuple[int, int]]
) -> None:
    """As speculation runs: a committed token and drafts, of which only the first few were right.

    Other sequences' drafts are verified in the same steps.
    """
    want = yardstick(rig, LONGEST, rounded)
    rig.extend(SLOT, 0, IDS[:start], rounded)
    beside = some_ids(5)
    rig.extend(OTHERS[0], 0, beside[:30], rounded)
    done = start
    for number, (right, wrong) in enumerate(blocks):
        right, wrong = min(right, 7), min(wrong, 7 - min(right, 7))
        ids = IDS[done : done + 1 + right]
        drafts = [(token + 1) % 512 for token in IDS[done + 1 + right : done + 1 + right + wrong]]
        parts = [Part(OTHERS[0], 30, beside[30 : 31 + number % 3]), Part(SLOT, done, ids + drafts)]
        logits = rig.step(parts, rounded=rounded)[1]
        assert_bits(logits[: len(ids)], want.logits[done : done + len(ids)], f"block {number}")
        done += len(ids)
    assert_same_bits(rig.live(SLOT, done), yardstick(rig, done, rounded).state, "at the end")


def test_a_probe_rolls_back(rig: Rig) -> None:
    """The same through the door that tests and golden comparers use."""
    probe = Probe.open(TINY, max_seq=256)
    state, _ = probe.prefill(IDS[:67])
    probe.extend(state, some_ids(3, 9))
    probe.rollback(state, 67)
    got = probe.extend(state, IDS[67:80])
    _, want = probe.prefill(IDS[:80])
    assert_bits(got, want[67:], "after the rollback")


def test_a_probe_refuses_to_roll_back_beyond_its_rings() -> None:
    probe = Probe.open(TINY, max_seq=256)
    state, _ = probe.prefill(IDS[:100])
    for length in (101, 100 - 2 * MAX_ROWS - 1):
        with pytest.raises(DeviceError, match="roll back"):
            probe.rollback(state, length)
    probe.rollback(state, 100 - 2 * MAX_ROWS)
    with pytest.raises(DeviceError, match="roll back"):  # not in two goes either
        probe.rollback(state, 100 - 2 * MAX_ROWS - 1)


# --- what runs it ---

_DIGEST = """
import sys
from pathlib import Path
from blake3 import blake3
from ultraflash.runtime.probe import Probe
probe = Probe.open(Path(sys.argv[1]), max_seq=64)
ids = [(7 * i * i + 3) % 512 for i in range(40)]
state, logits = probe.prefill(ids[:33])
digest = blake3(logits.tobytes())
for token in ids[33:]:
    digest.update(probe.extend(state, [token]).tobytes())
print(digest.hexdigest())
"""


def test_the_number_of_blas_threads_does_not_matter() -> None:
    found = set()
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST, str(TINY)],
            capture_output=True,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads},
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
