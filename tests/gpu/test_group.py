"""The tiny model on two ranks: node by node, free, through the engine, and thousands of replays.

Each test runs with ranks that share a GPU, and where there are two, with one on each. A rank that
waits for ever would be a hang: `faulthandler` ends the run then and says where it was.
"""

from __future__ import annotations

import faulthandler
import time
from typing import Any

import numpy as np
import pytest

from helpers.device import count, report
from helpers.device_group import (
    SHARED,
    Array,
    forced,
    open_group,
)
from helpers.device_rig import TINY, DeviceRig
from helpers.rig import Rig
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling
from ultraflash.runtime.interpret import NumpyBackend
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights
from ultraflash.runtime.weights.table import weight_table
from ultraflash.tools.golden.free import judge_logits
from ultraflash.tools.golden.limits import TIGHT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200), pytest.mark.usefixtures("no_hang")]

SILENCE_S = 40
REPLAYS = count("UF_GPU_GROUP_REPLAYS", 5000, 200)


@pytest.fixture(scope="module")
def rig(where: str) -> DeviceRig:
    config = RuntimeConfig.from_env(checkpoint=TINY)
    model = Model.from_checkpoint(TINY)
    return DeviceRig(kept=True, backend=open_group(where, 2, config, model, keep_scratch=True))


def ids_of(number: int) -> list[int]:
    ids: list[int] = np.random.default_rng(number).integers(3, 480, number).tolist()
    return ids


def fed(rig: DeviceRig, slot: int, ids: list[int], width: int) -> Array:
    """Logits of a text that is given in steps of so many rows."""
    logits = []
    for at in range(0, len(ids), width):
        piece = ids[at : at + width]
        logits.append(rig.step([Part(slot, at, piece)])[0].values["logits"])
    return np.concatenate(logits)


def test_logits_agree_with_the_interpreter_s_ranks(rig: DeviceRig, where: str) -> None:
    """Within the limits for two correct programs; any width gives the same bits."""
    ids = ids_of(100)
    got = fed(rig, 0, ids, 8)
    for width in (1, 3):
        assert fed(rig, 1, ids, width).tobytes() == got.tobytes(), f"steps of {width} rows"
    want = Rig(TINY, 2, slots=2).extend(0, 0, ids)
    verdict = judge_logits(got, want, TIGHT.logits, TIGHT)
    assert verdict.ok, verdict.note
    report(f"tiny model, world 2 on {where}: logits of 100 tokens {verdict.note}")


def test_every_node_on_every_rank(rig: DeviceRig, where: str) -> None:
    """Each starts from the interpreter's values, so that an error has nowhere to hide."""
    ids = ids_of(50)
    numpy = NumpyBackend(load_weights(CheckpointIndex.open(TINY), rig.model, 2), 2)
    for start, rows in ((0, 44), (44, 6)):
        plan = build_decode(rig.build, rows, 1)
        ours = numpy.compile(plan)
        write_constants(ours)
        write_step(ours, [Part(4, start, ids[start : start + rows])])
        if not start:
            ours.run()
    theirs: Any = rig.runner("decode", 6)
    write_step(theirs, [Part(4, 44, ids[44:])])
    found = list(forced(plan, ours, theirs))
    wrong = [f"rank {rank}: {d}" for rank, d in found if d.verdict == "DIFFERS"]
    assert not wrong, f"{len(wrong)} of {len(found)} buffers\n" + "\n".join(wrong[:20])
    same = sum(d.verdict == "same" for _, d in found)
    report(f"forced nodes, world 2 on {where}: {len(found)} buffers, {same} equal to the bit")


def replicated(plan: Plan, model: Model) -> list[str]:
    """Buffers that owe nothing to a slice of a weight: an exchange ends its influence."""
    sliced = {row.name for row in weight_table(model).values() if row.axis is not None}
    for node in plan.nodes:
        if any(ref.name in sliced for ref in node.op.reads()) and not node.op.COLLECTIVE:
            sliced |= {ref.name for ref in node.op.writes()}
    kept = [name for name, ref in plan.buffers.items() if ref.life is not Life.WEIGHT]
    return [name for name in kept if name not in sliced]


def test_ranks_hold_the_same_bits(rig: DeviceRig) -> None:
    ids = ids_of(60)
    fed(rig, 2, ids[:56], 8)
    rig.step([Part(2, 56, ids[56:])])
    runner: Any = rig.runner("decode", 4)
    shared = replicated(runner.plan, rig.model)
    assert len(shared) > 100
    for name in shared:
        one, two = (runner.read(name, rank).tobytes() for rank in range(2))
        assert one == two, name


def test_greedy_answers_agree_with_the_interpreter_s_engine(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Alone or beside another request: one answer; and the interpreter's, for a while at least."""
    request = Generation(tuple(ids_of(20)), 40, Sampling(temperature=0), ignore_eos=True)
    settings: dict[str, Any] = {"world": 2, "max_seq": 128}
    numpy = RuntimeConfig(TINY, backend="numpy", cache_dir=tmp_path, **settings)
    want = generate(Engine.open(numpy), {"a": request})["a"]

    def group(config: RuntimeConfig, index: Any, model: Model, progress: Any) -> Any:
        return open_group(where, 2, config, model)

    if where == SHARED:  # which a server may not
        monkeypatch.setattr("ultraflash.runtime.engine.open_backend", group)
    cuda = RuntimeConfig.from_env(checkpoint=TINY, backend="cuda", gpus=(0, 1), **settings)
    engine = Engine.open(cuda)
    got = generate(engine, {"a": request})["a"]
    other = Generation(tuple(ids_of(33)), 30, Sampling(seed=1), ignore_eos=True)
    assert generate(engine, {"b": other, "a": request})["a"] == got
    again = Generation((*request.ids, *got[:10]), 30, Sampling(temperature=0), ignore_eos=True)
    assert generate(engine, {"a": again})["a"] == got[10:]
    same = next((n for n, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
    report(f"engine of world 2 on {where}: {same} of {len(want)} greedy tokens as in NumPy")
    assert same >= 4


def generate(engine: Engine, requests: dict[str, Generation]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {key: [] for key in requests}
    for key, request in requests.items():
        engine.submit(key, request)
    while engine.has_work:
        for step in engine.step():
            tokens[step.key] += step.tokens
    return tokens


@pytest.mark.parametrize("rows", [1, 8])
def test_replays(rig: DeviceRig, where: str, rows: int) -> None:
    """No hang, no drift: every replay says the same, some of them launched without waiting."""
    ids = ids_of(40 + rows)
    fed(rig, 3, ids[:40], 8)
    runner: Any = rig.runner("decode", rows)
    group: Any = rig.backend
    wait = group.stream.wait
    write_step(runner, [Part(3, 40, ids[40:])])
    runner.run()
    first = runner.read("head.logits_all").tobytes()
    started = time.perf_counter()
    piece = max(1, REPLAYS // 100)
    for done in range(0, REPLAYS, piece):
        faulthandler.dump_traceback_later(SILENCE_S, exit=True)
        write_step(runner, [Part(3, 40, ids[40:])])
        for _ in range(piece):
            runner.launch()
            if done % (2 * piece):
                wait()
        wait()
        for rank in range(2):
            assert runner.read("head.logits_all", rank).tobytes() == first, f"after {done}"
    each = 1e6 * (time.perf_counter() - started) / REPLAYS
    report(f"{REPLAYS} replays of {rows} rows at world 2 on {where}: {each:.0f} us each, no change")
