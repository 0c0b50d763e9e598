"""Prefill without the decoder: by the two CED plans, and by the full plan with windows cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from helpers.drafting import GREEDY, Behind, DraftRig
from ultraflash.graphs.ced import build_encode, build_replay, replay_start
from ultraflash.graphs.prefill import build_prefill
from ultraflash.runtime.step_io import Draw, Part, write_step

TAIL = 24  # above tiny-a's window of 16


def ids_of(number: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(number).integers(3, 480, count).tolist()
    return ids


def ced(
    rig: DraftRig, slot: int, ids: list[int], mode: str, cuts: tuple[int, ...] = (16,),
    tail: int = TAIL, draw: Draw = GREEDY,
) -> Behind:  # fmt: skip
    """The two plans, the prompt cut into chunks of these lengths, over and over."""
    done = 0
    widest = max(cuts)
    make = partial(build_encode, rig.build, mode, tail, widest)
    encoder = rig.compiled(("encode", mode, tail, widest), make)
    for length in chunks(cuts, len(ids)):
        write_step(encoder, [Part(slot, done, ids[done : done + length])])
        encoder.run()
        done += length
    start = max(0, len(ids) - tail)
    replay = rig.compiled(("replay", mode, tail), partial(build_replay, rig.build, mode, tail))
    return rig.ran(replay, Part(slot, start, ids[start:], draw, window_start=start))[0]


def chunks(cuts: tuple[int, ...], count: int) -> Iterator[int]:
    done = number = 0
    while done < count:
        yield min(cuts[number % len(cuts)], count - done)
        done, number = done + cuts[number % len(cuts)], number + 1


def masked(
    rig: DraftRig, slot: int, ids: list[int], mode: str, tail: int = TAIL, draw: Draw = GREEDY
) -> Behind:
    """All layers over all rows; behind the encoder, rows of the tail see no row in front of it."""
    runner = rig.compiled(("prefill", len(ids)), partial(build_prefill, rig.build, len(ids)))
    part = Part(slot, 0, ids, draw)
    write_step(runner, [part])
    behind = runner.plan.span(f"L{replay_start(rig.model, mode)}").start
    runner.run(slice(0, behind))
    start = max(0, len(ids) - tail)
    runner.write("io.window_start", np.where(np.arange(len(ids)) < start, 0, start))
    runner.run(slice(behind, len(runner.plan.nodes)))
    return rig.results(runner, part)[0]
