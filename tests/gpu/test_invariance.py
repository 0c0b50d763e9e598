"""A row's bits do not depend on how many rows there are, on its neighbours, or on its slot.

The yardstick is plain decoding: one row a step, alone. Its greedy answers serve as drafts, so that
wide steps accept them and must say, of every row, exactly what the plain step said. Both layouts
of scratch: every buffer its own, so that logits can be read, and shared, as the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from helpers.device import count, report, sized
from helpers.device_rig import (
    BLOCK,
    OF_ROW,
    DeviceRig,
    Outcome,
    State,
    assert_same_outcome,
    assert_same_state,
)
from ultraflash.runtime.step_io import Draw, Part

pytestmark = pytest.mark.gpu

STEPS = sized(120, 40)
RAGGED = count("UF_GPU_RAGGED", 150, 8)
REPEATS = count("UF_GPU_REPEATS", 400, 5)
GREEDY = Draw(want_logprobs=True)
# Where something changes: window 16, top-8 of pairs and of singles, the pool of 16, rings of 64.
PROMPTS = (1, 9, 30, 57)
SLOTS = (1, 2, 3, 4, 5)


@dataclass
class Told:
    """A conversation in plain decoding: what each step said, and the state behind it."""

    prompt: int
    ids: list[int]
    outcomes: dict[int, Outcome]  # by the position of the row
    states: dict[int, State]  # by length

    @property
    def last(self) -> int:
        return max(self.outcomes)


@pytest.fixture(scope="module", params=[True, False], ids=["own", "shared"])
def rig(request: pytest.FixtureRequest) -> DeviceRig:
    return DeviceRig(kept=request.param)


@cache
def told(rig: DeviceRig, number: int) -> Told:
    """The conversation of this number, in slot 0."""
    length = PROMPTS[number]
    ids = some_ids(number, length)
    first = rig.prompt(0, ids, GREEDY)
    made = Told(length, [*ids, first.token], {}, {length: rig.live(0, length)})
    for position in range(length, length + STEPS):
        (out,) = rig.step([Part(0, position, [made.ids[position]], GREEDY)])
        made.outcomes[position], made.states[position + 1] = out, rig.live(0, position + 1)
        made.ids.append(out.token)
    return made


def some_ids(number: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(number).integers(3, 480, length).tolist()
    return ids


def part_of(story: Told, slot: int, start: int, right: int, wrong: int = 0) -> Part:
    """The token at `start` and drafts behind it: some that come true, then some that do not."""
    ids = story.ids[start : start + 1 + right]
    ids += [(token + 1) % 512 for token in story.ids[start + 1 + right :][:wrong]]
    return Part(slot, start, ids, GREEDY)


def check(rig: DeviceRig, story: Told, part: Part, got: Outcome, right: int, where: str) -> None:
    """A step that accepts `right` drafts against as many plain steps."""
    assert got.accepted == right, f"{where}: {got.accepted} accepted, not {right}"
    last = story.outcomes[part.start + right]
    for name in ("token", "drafts", "confidence"):
        assert got.values[name].tobytes() == last.values[name].tobytes(), f"{where}: {name} differs"
    for row in range(right + 1):
        want = story.outcomes[part.start + row]
        for name in OF_ROW + (("logits",) if rig.kept else ()):
            same = got.values[name][row].tobytes() == want.values[name][0].tobytes()
            assert same, f"{where}: {name} of row {row} differs"
    length = part.start + right + 1
    assert_same_state(rig.live(part.slot, length), story.states[length], where)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_any_width(rig: DeviceRig, rows: int) -> None:
    """Alone, in a plan that the rows fill, from starts on both sides of every limit."""
    for number in range(len(PROMPTS)):
        story = told(rig, number)
        starts = [story.prompt + n for n in sized((0, 1, 6, 25, 54, 55, 90), (0, 7))]
        for start in [s for s in starts if s + rows - 1 <= story.last]:
            slot = SLOTS[(rows + start) % len(SLOTS)]
            rig.prompt(slot, story.ids[:start], GREEDY)
            part = part_of(story, slot, start, rows - 1)
            (got,) = rig.step([part])
            check(rig, story, part, got, rows - 1, f"{rows} rows at {start}")


@pytest.mark.parametrize("rows", range(1, 9))
def test_idle_rows(rig: DeviceRig, rows: int) -> None:
    """One row in plans of any width and of up to three sequences."""
    story = told(rig, 1)
    start = story.prompt + 20
    rig.prompt(2, story.ids[:start], GREEDY)
    for sequences in range(1, min(rows, 3) + 1):
        part = part_of(story, 2, start, 0)
        (got,) = rig.step([part], rows, sequences)
        check(rig, story, part, got, 0, f"1 of {rows} rows, {sequences} sequences")


def test_any_neighbours(rig: DeviceRig, seed: int) -> None:
    """Up to four sequences in any slots and order, ragged, with right and wrong drafts."""
    rng = np.random.default_rng(seed)
    for case in range(RAGGED):
        busy = int(rng.integers(1, 5))
        slots = rng.permutation(SLOTS)[:busy].tolist()
        numbers = rng.permutation(len(PROMPTS))[:busy].tolist()
        left, parts, rights = 8 - busy, [], []
        for slot, number in zip(slots, numbers, strict=True):
            story = told(rig, number)
            drafts = int(rng.integers(0, left + 1))
            right = int(rng.integers(0, drafts + 1))
            start = int(rng.integers(story.prompt, story.last - drafts))
            rig.prompt(slot, story.ids[:start], GREEDY)
            parts.append(part_of(story, slot, start, right, drafts - right))
            rights.append(right)
            left -= drafts
        rows = sum(len(part.ids) for part in parts)
        rows += int(rng.integers(0, 9 - rows))
        results = rig.step(parts, rows, busy + int(rng.integers(0, 2)))
        where = f"case {case}: {[(p.slot, p.start, len(p.ids)) for p in parts]} in {rows} rows"
        for number, part, got, right in zip(numbers, parts, results, rights, strict=True):
            check(rig, told(rig, number), part, got, right, where)


def test_a_whole_conversation_beside_others(rig: DeviceRig) -> None:
    """All of them side by side, step after step, in another order each time."""
    stories = {slot: told(rig, number) for number, slot in enumerate((5, 3, 1, 2))}
    for slot, story in stories.items():
        rig.prompt(slot, story.ids[: story.prompt], GREEDY)
    for step in range(sized(80, 20)):
        order = np.random.default_rng(step).permutation(list(stories)).tolist()
        parts = [part_of(stories[s], s, stories[s].prompt + step, 0) for s in order]
        for slot, part, got in zip(order, parts, rig.step(parts), strict=True):
            check(rig, stories[slot], part, got, 0, f"step {step} of slot {slot}")


def test_graph_and_single_launches_agree(rig: DeviceRig) -> None:
    story = told(rig, 2)
    for rows in (1, 5, 8):
        rig.prompt(4, story.ids[:40], GREEDY)
        part = part_of(story, 4, 40, rows - 1)
        (one,) = rig.step([part])
        (two,) = rig.step([part], span=slice(None))
        assert_same_outcome(two, one, f"{rows} rows")
        check(rig, story, part, two, rows - 1, f"{rows} rows one by one")


# --- sampled sequences ---


@dataclass
class Sampled:
    """A sampled conversation: proposals that each step verifies, by a schedule of its own."""

    number: int
    slot: int
    done: int = 0
    step: int = 0
    token: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def draw(self) -> Draw:
        temperature, top_p = (0.7, 1.3, 2.0)[self.number], (1.0, 0.9, 0.95)[self.number]
        return Draw(temperature, top_p, (0, 50, 9)[self.number], 77 + self.number, self.step, True)

    def begin(self, rig: DeviceRig) -> None:
        ids = some_ids(self.number, PROMPTS[self.number + 1])
        out = rig.prompt(self.slot, ids, self.draw)
        self.done, self.token, self.drafts = len(ids), out.token, tuple(out.drafts)

    def part(self) -> Part:
        width = int(np.random.default_rng([self.number, self.step]).integers(0, 3))
        self.step += 1
        return Part(self.slot, self.done, [self.token, *self.drafts[:width]], self.draw)

    def take(self, out: Outcome) -> None:
        self.done += 1 + out.accepted
        self.token, self.drafts = out.token, tuple(out.drafts)


def test_sampled_neighbours_do_not_matter(rig: DeviceRig) -> None:
    """Tokens, proposals and what these were drawn from: the same as alone."""
    steps = sized(25, 4)
    alone: dict[int, list[tuple[Outcome, State]]] = {}
    for number in range(3):
        one, alone[number] = Sampled(number, 0), []
        one.begin(rig)
        for _ in range(steps):
            (out,) = rig.step([one.part()])
            one.take(out)
            alone[number].append((out, rig.live(0, one.done, drawn=True)))
    together = [Sampled(number, slot) for number, slot in enumerate((4, 1, 5))]
    for one in together:
        one.begin(rig)
    for step in range(steps):
        order = np.random.default_rng(step).permutation(3).tolist()
        results = rig.step([together[n].part() for n in order])
        for number, out in zip(order, results, strict=True):
            one, (want, state) = together[number], alone[number][step]
            one.take(out)
            assert_same_outcome(out, want, f"step {step} of {number}")
            live = rig.live(one.slot, one.done, drawn=True)
            assert_same_state(live, state, f"step {step} of {number}")


def test_one_step_hundreds_of_times(rig: DeviceRig) -> None:
    """Races show as a difference now and then. A step overwrites what its drafts were drawn from,
    so that this is put back each time."""
    runs = [Sampled(0, 4), Sampled(1, 1), Sampled(2, 2)]
    for one in runs:
        one.begin(rig)
    for widths in ((5, 1, 2), (3, 3, 2), (1, 1, 1), (8, 0, 0)):
        parts = []
        for one, width in zip(runs, widths, strict=True):
            if width:
                part = Part(one.slot, one.done, [one.token, *one.drafts[: width - 1]], one.draw)
                parts.append(part._replace(draw=one.draw._replace(step=1)))
        rig.runner("decode", sum(len(p.ids) for p in parts), len(parts))
        kept = {p.slot: rig.backend.read_state("draft.q", p.slot, 0, BLOCK) for p in parts}
        first: list[Outcome] = []
        state: State = {}
        for repeat in range(REPEATS):
            for slot, q in kept.items():
                rig.backend.write_state("draft.q", slot, 0, q)
            results = rig.step(parts)
            if not repeat:
                first, state = results, rig.everything()
            for got, want in zip(results, first, strict=True):
                assert_same_outcome(got, want, f"repeat {repeat} of {widths}")
            if repeat % 50 == 49 or repeat == REPEATS - 1:
                assert_same_state(rig.everything(), state, f"repeat {repeat} of {widths}")
        for slot, q in kept.items():
            rig.backend.write_state("draft.q", slot, 0, q)
    report(f"{4 * REPEATS} repeats of 4 steps are equal bit for bit")
