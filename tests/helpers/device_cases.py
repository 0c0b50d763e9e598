"""Every single operation that the plans of some models have: a case is one with a plan's shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from helpers.device_rig import TINY
from helpers.device_weights import shrunk
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Op, Plan, Ref
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build


@dataclass(frozen=True)
class Case:
    """One operation; the name says where it was found first."""

    name: str
    op: Op

    def rng(self, trial: int) -> np.random.Generator:
        """Another sequence for every case and trial, the same on every machine."""
        digest = hashlib.sha256(f"{self.name} {trial}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def signature(op: Op) -> tuple[Any, ...]:
    """Equal for operations that differ in buffer names only."""
    parts: list[Any] = [type(op).__name__]
    for f in fields(op):
        value = getattr(op, f.name)
        parts.append((value.shape, value.dtype) if isinstance(value, Ref) else value)
    return tuple(parts)


def cases(named: Iterable[tuple[str, Plan]], *, whole: bool = False) -> tuple[Case, ...]:
    """Each distinct operation of the plans that has a kernel; `whole`: all experts and rows."""
    found: dict[tuple[Any, ...], Case] = {}
    for name, plan in named:
        for node in plan.nodes:
            op = node.op if whole else shrunk(node.op)
            case = Case(f"{name}-{type(op).__name__}-{node.label}", op)
            if not op.COLLECTIVE:
                found.setdefault(signature(op), case)
    return tuple(found.values())


@cache
def tiny_cases() -> tuple[Case, ...]:
    """Every plan of the tiny model: widths, prefill chunks, the two halves of CED; world 2."""
    model, capacity = Model.from_checkpoint(TINY), Capacity(5, 256)
    plans = []
    for rows, sequences, block in ((1, 1, 5), (2, 1, 5), (3, 2, 6), (4, 2, 7), (5, 3, 5), (7, 1, 7),
                                   (8, 3, 7), (8, 5, 5), (16, 4, 5)):  # fmt: skip
        build = Build(model, capacity, block=block, round_attention=rows % 2 == 0)
        plans.append((f"tiny-{rows}x{sequences}", build_decode(build, rows, sequences)))
    split = Build(model, capacity, world=2, block=5)
    plans.append(("tiny-world2-6x2", build_decode(split, 6, 2)))
    build = Build(model, capacity, block=5)
    plans += [(f"tiny-prefill{n}", build_prefill(build, n)) for n in (16, 33, 128)]
    for mode in ("ced20", "ced21"):
        plans.append((f"tiny-{mode}", build_encode(build, mode, 24, 16)))
        plans.append((f"tiny-replay-{mode}", build_replay(build, mode, 24)))
    return cases(plans)


RELEASE_WIDTHS = ((1, 1, 5), (4, 2, 6), (8, 3, 7))  # rows, sequences, block


def release_decode(world: int) -> list[tuple[str, Plan]]:
    """Decode plans of the released model on one of `world` ranks; pools have to choose."""
    model, capacity = release_model(), Capacity(4, 32768)
    builds = {widths: Build(model, capacity, world, widths[2]) for widths in RELEASE_WIDTHS}
    return [(f"world{world}-{n}x{m}", build_decode(b, n, m)) for (n, m, _), b in builds.items()]


@cache
def release_cases(world: int) -> tuple[Case, ...]:
    """The released model's shapes on one of `world` ranks."""
    plans = release_decode(world)
    if world == 1:
        build = Build(release_model(), Capacity(4, 32768), world, 5)
        ends = [
            ("prefill", build_prefill(build, 16)),
            ("replay", build_replay(build, "ced21", 136)),
        ]
        names = ("LastIo", "TakeLast", "RingRead")
        few = [(name, _only(plan, names)) for name, plan in ends]
        plans += [(f"release-{name}", plan) for name, plan in few]
    return cases(plans)


def _only(plan: Plan, names: tuple[str, ...]) -> Plan:
    nodes = tuple(n for n in plan.nodes if type(n.op).__name__ in names)
    return replace(plan, nodes=nodes)
