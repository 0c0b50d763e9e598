"""State leaves and comes back on the device while steps run: the same bytes as standing still.

What a conversation leaves in the store and takes from there: tests/runtime/test_reuse.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from helpers.device import count, report, sized
from helpers.device_rig import DeviceRig, Outcome, State, assert_same_outcome, assert_same_state
from helpers.full_size_state import full_size_backend, full_size_layout, random_bytes
from ultraflash.graphs.plan import Life
from ultraflash.runtime.backend import Bytes, Rows, Staged
from ultraflash.runtime.resume import Kind
from ultraflash.runtime.snapshot import Layout
from ultraflash.runtime.step_io import Draw, Part

pytestmark = pytest.mark.gpu

GREEDY = Draw(want_logprobs=True)
POINTS = count("UF_GPU_POINTS", 400, 40)
MORE = 50  # tokens behind a restored prefix
PROMPT = 12
HEADER = 48
SEGMENT = 8192


@pytest.fixture(scope="module")
def rig() -> DeviceRig:
    return DeviceRig(kept=False, max_seq=512)


@pytest.fixture(scope="module")
def layout(rig: DeviceRig) -> Layout:
    return Layout.of(rig.model, rig.runner("decode", 1).plan.of_life(Life.STATE))


@dataclass
class Told:
    """Plain greedy decoding that nothing disturbed: by length, what was said and the state."""

    ids: list[int]
    outcomes: dict[int, Outcome]
    states: dict[int, State]
    points: dict[int, bytes]  # as blocking reads of single buffers give them


@pytest.fixture(scope="module")
def told(rig: DeviceRig, layout: Layout) -> Told:
    ids = np.random.default_rng(3).integers(3, 480, PROMPT).tolist()
    out = rig.prompt(0, ids, GREEDY)
    made = Told([*ids, out.token], {}, {}, {})
    for length in range(PROMPT + 1, PROMPT + POINTS + 1):
        (out,) = rig.step([Part(0, length - 1, [made.ids[-1]], GREEDY)])
        made.ids.append(out.token)
        made.outcomes[length], made.states[length] = out, rig.live(0, length)
        made.points[length] = blocking(rig, layout, 0, length)
    return made


def blocking(rig: DeviceRig, layout: Layout, slot: int, length: int) -> bytes:
    """The payload of a point, row by row."""
    refs = {ref.name: ref for ref in rig.runner("decode", 1).plan.of_life(Life.STATE)}
    windows = [*layout.encoder_windows, *layout.decoder_windows]
    wanted = [(ref.name, min(length, layout.window)) for ref in windows]
    wanted += [(ref.name, length % 2) for ref in layout.pending]
    wanted += [("engram.history", min(length, layout.history_rows))]
    data = b""
    for name, rows in wanted:
        ring = rig.backend.read_state(name, slot, 0, refs[name].shape[1])
        data += b"".join(ring[p % len(ring)].tobytes() for p in range(length - rows, length))
    return data


def test_points_leave_while_decoding_goes_on(rig: DeviceRig, layout: Layout, told: Told) -> None:
    """Nobody waits for a point before the next step runs; with all entries, and in wide steps."""
    for width in (1, 5):
        slot = width
        rig.prompt(slot, told.ids[:PROMPT], GREEDY)
        leaving: list[tuple[int, Staged, Staged]] = []
        length = PROMPT
        while length + width <= PROMPT + POINTS:
            rig.step([Part(slot, length, told.ids[length : length + width], GREEDY)])
            length += width
            # A ring reaches back over what has been processed behind the point, too.
            at = length - len(leaving) % width
            parts = [layout.point(at, Kind.FULL), layout.segment(at // 2, at)]
            point, segment = rig.backend.stage(slot, parts)
            leaving.append((at, point, segment))
        for at, point, segment in leaving:
            assert point.take()[HEADER:] == told.points[at], f"point at {at}, {width} rows"
            want = layout.export_segment(rig.backend, slot, at // 2, at)
            assert segment.take() == want, f"segment up to {at}, {width} rows"
        report(f"{len(leaving)} points left during as many steps of {width} rows, bit for bit")


@pytest.mark.parametrize("length", sized([13, 14, 16, 17, 31, 32, 63, 64, 65, 128, 201, 300], [17]))
def test_restored_in_another_slot(rig: DeviceRig, layout: Layout, told: Told, length: int) -> None:
    """Fifty tokens behind it are those of the conversation that was never disturbed."""
    rig.prompt(1, told.ids[:PROMPT], GREEDY)
    for at in range(PROMPT, length):
        rig.step([Part(1, at, [told.ids[at]], GREEDY)])
    rig.step([Part(1, length, [(told.ids[length] + 1) % 480, 7, 8], GREEDY)])  # rejected
    cuts = pairwise([*range(0, length, 32), length])
    parts = [layout.point(length, Kind.FULL), *(layout.segment(*cut) for cut in cuts)]
    point, *segments = rig.backend.stage(1, parts)
    for slot in (1, 2):
        scramble(rig, slot)  # a step that follows, and somebody else's conversation
    layout.restore(rig.backend, 2, length, point.take(), [s.take() for s in segments])
    token = told.ids[length]
    for at in range(length, min(length + MORE, PROMPT + POINTS)):
        assert token == told.ids[at]
        (out,) = rig.step([Part(2, at, [token], GREEDY)])
        assert_same_outcome(out, told.outcomes[at + 1], f"token {at - length} behind {length}")
        token = out.token
    end = min(length + MORE, PROMPT + POINTS)
    assert_same_state(rig.live(2, end), told.states[end], f"{end - length} tokens behind {length}")


def scramble(rig: DeviceRig, slot: int) -> None:
    rng = np.random.default_rng(slot)
    for ref in rig.runner("decode", 1).plan.of_life(Life.STATE):
        if ref.name != "draft.q":
            rows = rng.integers(90, 125, ref.shape[1:])  # no NaN among codes and scales
            rig.backend.write_state(ref.name, slot, 0, rows)


# --- at full size ---


def parts_of(layout: Layout, length: int, seed: int) -> list[tuple[list[Rows], Bytes]]:
    """Random bytes for a point and the segment before it."""
    start = length - SEGMENT
    point, segment = layout.point(length, Kind.FULL)[1], layout.segment(start, length)[1]
    return [
        (point, random_bytes(layout.point_bytes(length, Kind.FULL), seed)),
        (segment, random_bytes(layout.segment_bytes(start, length), seed + 1)),
    ]


def test_full_size_points_pass_each_other(rig: DeviceRig) -> None:
    """Out and back in turns, far more than there are lanes; nobody waits before the end."""
    layout = full_size_layout()
    backend = full_size_backend(rig.backend)
    lengths = [SEGMENT + n for n in (0, 129, 200)]
    contents = [parts_of(layout, n, 1000 * n) for n in lengths]
    leaving = []
    for turn in range(count("UF_GPU_FULL_POINTS", 120, 2)):
        which = turn % len(lengths)
        backend.restore(turn % 2, contents[which])
        heads = [(bytes([turn]), rows) for rows, _ in contents[which]]
        leaving.append((which, turn, backend.stage(turn % 2, heads)))
        if len(leaving) == 12:
            check_whole(contents, leaving)
            leaving = []
    check_whole(contents, leaving)


def check_whole(
    contents: list[list[tuple[list[Rows], Bytes]]], leaving: list[tuple[int, int, list[Staged]]]
) -> None:
    for which, turn, parts in leaving:
        for staged, (_, want) in zip(parts, contents[which], strict=True):
            got = staged.take()
            assert got[0] == turn
            same = np.array_equal(np.frombuffer(got, np.uint8)[1:], np.frombuffer(want, np.uint8))
            assert same, f"turn {turn} of length {which} differs"


@dataclass
class Cost:
    """Milliseconds of steps with and without points between them."""

    others: list[float]
    taking: list[float]  # from the moment when a point is taken to the end of the next step
    staging: list[float]  # of these, until the step is launched
    late: list[float]  # from that moment until all of it can be taken at the host

    def __str__(self) -> str:
        p50, p99, most = (float(np.percentile(self.others, q)) for q in (50, 99, 100))
        line = f"a step {p50:.3f} ms p50, {p99:.3f} p99, {most:.3f} longest"
        for what, times in (
            ("with a point and a segment", self.taking),
            ("of which staging", self.staging),
            ("at the host after", self.late),
        ):
            if times:
                line += f"; {what} {np.median(times):.3f} p50, {max(times):.3f} longest"
        return line


def test_what_a_point_costs_the_steps(rig: DeviceRig, told: Told) -> None:
    """Steps of the tiny model with and without points of full size between them; only printed."""
    layout, backend = full_size_layout(), full_size_backend(rig.backend)
    length = SEGMENT + 129

    def stage() -> list[Staged]:
        parts = [layout.point(length, Kind.FULL), layout.segment(length - SEGMENT, length)]
        return backend.stage(0, parts)

    def run(every: int) -> Cost:
        rig.prompt(3, told.ids[:PROMPT], GREEDY)
        cost, leaving = Cost([], [], [], []), []
        for number in range(sized(400, 20)):
            started = time.perf_counter()
            taking = every and number % every == every - 1
            if taking:
                leaving.append((started, stage()))
                cost.staging.append(since(started))
            elif leaving and all(staged.wait(0) for staged in leaving[0][1]):
                cost.late.append(since(leaving.pop(0)[0]))
            rig.step([Part(3, PROMPT + number, [told.ids[PROMPT + number]], GREEDY)])
            (cost.taking if taking else cost.others).append(since(started))
        return cost

    run(10)
    for every in (0, 10, 0, 10):
        report(str(run(every)))
    times = []
    for _ in range(20):
        started = time.perf_counter()
        for staged in stage():
            staged.take()
        times.append(since(started))
    report(f"the same two waited for: {np.median(times):.2f} ms")


@pytest.mark.parametrize("length", [SEGMENT + 129, sized(100_001, 10_001)])
def test_what_a_restore_takes(rig: DeviceRig, told: Told, length: int) -> None:
    """From bytes in the store to the end of the step behind it; only printed, and equal."""
    layout, backend = full_size_layout(), full_size_backend(rig.backend)
    cuts = list(pairwise([*range(0, length, SEGMENT), length]))
    point = layout.export_point(backend, 0, length, Kind.FULL)
    segments = [layout.export_segment(backend, 0, *cut) for cut in cuts]
    rig.prompt(3, told.ids[:PROMPT], GREEDY)
    times = []
    for _ in range(sized(10, 2)):
        started = time.perf_counter()
        layout.restore(backend, 1, length, point, segments)
        rig.step([Part(3, PROMPT, [told.ids[PROMPT]], GREEDY)])
        times.append(since(started))
    size = len(point) + sum(map(len, segments))
    report(
        f"a restore of {length:,} tokens, {size:,} bytes, and a step behind it: "
        f"{np.median(times):.2f} ms, {max(times):.2f} longest"
    )
    assert layout.export_point(backend, 1, length, Kind.FULL) == point
    assert all(layout.export_segment(backend, 1, *cut) == data
               for cut, data in zip(cuts, segments, strict=True))  # fmt: skip


def since(started: float) -> float:
    """Milliseconds."""
    return (time.perf_counter() - started) * 1e3
