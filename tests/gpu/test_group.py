"""Several ranks on GPUs: exchanges to the bit, the tiny model split, replays, one rank alone.

Each test runs with ranks that share a GPU, and where there are two, with one on each. A rank that
waits for ever would be a hang: `faulthandler` ends the run then and says where it was.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.device import count, report, sized
from helpers.device_group import (
    APART,
    SHARED,
    Array,
    Exchanges,
    assert_same,
    gather,
    message,
    open_bare,
    open_group,
    poison,
    put,
    reduce,
    why_not,
)
from helpers.device_rig import BLOCK, TINY, DeviceRig
from helpers.rig import Rig
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.plan import Life, Plan, Ref
from ultraflash.graphs.step import Build
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling
from ultraflash.runtime.config import prepare_cache_dir
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.table import weight_table
from ultraflash.tools.golden.free import judge_logits
from ultraflash.tools.golden.limits import TIGHT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

SILENCE_S = 40
REPEATS = count("UF_GPU_EXCHANGES", 300, 20)
REPLAYS = count("UF_GPU_GROUP_REPLAYS", 5000, 200)
CHAIN = 200
LAUNCHES = count("UF_GPU_CHAINS", 500, 50)  # of that many exchanges each


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(SILENCE_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", params=[SHARED, APART])
def where(request: pytest.FixtureRequest) -> str:
    place: str = request.param
    if reason := why_not(place, 2):
        pytest.skip(reason)
    return place


# --- exchanges ---


def lengths(world: int) -> Exchanges:
    """Every way a message may lie: short, ragged, rows, large, in two pieces, and short again."""
    return Exchanges.of(
        [
            reduce(0, 7, 5120, rounded=True),
            reduce(1, 1, 1),
            gather(2, world, 5, 33),
            reduce(3, 3, 6, 32),
            gather(4, world, 8, 16160),
            reduce(5, 3, 200_001),
            reduce(6, 1, 7, rounded=True),
            gather(7, world, 2, 300_000),
            gather(8, world, 1, 1),
            reduce(9, 16, 5120, rounded=True),
        ],
        world,
    )


def test_exchanges_equal_their_references(where: str, rng: np.random.Generator) -> None:
    """Fresh messages every time; node by node, then as one graph."""
    exchange_all(open_bare(where, 2), lengths(2), rng, REPEATS // 10, where)


def test_many_small_exchanges(where: str, rng: np.random.Generator) -> None:
    ops = [reduce(n, 1 + n % 7, 64 + n, rounded=n % 2 == 0) for n in range(16)]
    ops += [gather(n, 2, 1 + n % 5, 10 + n) for n in range(16, 24)]  # type: ignore[misc]
    exchange_all(open_bare(where, 2), Exchanges.of(ops, 2), rng, REPEATS, where)


@pytest.mark.parametrize("world", [3, 4, 8])
def test_more_ranks_than_gpus(world: int, rng: np.random.Generator) -> None:
    """Small messages: all CTAs of all ranks have to fit on one GPU."""
    if reason := why_not(SHARED, world):
        pytest.skip(reason)
    ops = [reduce(0, 7, 512), gather(1, world, 3, 40), reduce(2, 2, 5, rounded=True)]
    exchange_all(open_bare(SHARED, world), Exchanges.of(ops, world), rng, 40, f"world {world}")


def exchange_all(
    backend: Any, exchanges: Exchanges, rng: np.random.Generator, repeats: int, where: str
) -> None:
    plan, world = exchanges.plan, backend.world
    runner = backend.compile(plan)
    messages: list[Any] = [node.op for node in plan.nodes]
    for repeat in range(repeats):
        parts = {op.x.name: [message(rng, op.x.shape) for _ in range(world)] for op in messages}
        want = exchanges.want(parts)
        for op in messages:
            poison(runner, op.y)
            for rank in range(world):
                put(runner, rank, op.x.name, parts[op.x.name][rank])
        runner.run(slice(None) if repeat % 4 == 3 else None)
        for op in messages:
            for rank in range(world):
                got = runner.read(op.y.name, rank)
                assert_same(got, want[op.y.name], f"{op} on rank {rank}, repeat {repeat}")
    report(f"exchanges on {where}: {repeats} x {len(messages)} equal on all {world} ranks")


def test_what_is_no_number_arrives_as_no_number(where: str) -> None:
    """The bits that mean 'nothing has arrived' may be sent, too: as another NaN."""
    exchanges = Exchanges.of([reduce(0, 1, 8), gather(1, 2, 1, 8)], 2)
    runner = open_bare(where, 2).compile(exchanges.plan)
    bits = np.array([[0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0xFFC00001, 0, 1, 2, 3]], np.uint32)
    for name in ("x0", "x1"):
        runner.write(name, bits.view(np.float32))
    runner.run()
    for rank in range(2):
        assert np.isnan(runner.read("y0", rank)[0]).tolist() == [True] * 4 + [False] * 4
        sent = runner.read("y1", rank).view(np.uint32).tolist()[0]
        assert sent == [0x7FFFFFFF, *bits[0].tolist()[1:]] * 2


# --- speed, and ranks that run ahead ---


def chain(world: int, rows: int, columns: int) -> Plan:
    """Sums of sums: each exchange sends what the one before it brought."""
    refs = [Ref(f"v{n}", (rows, columns), "f32", Life.SCRATCH) for n in range(CHAIN + 1)]
    ops = [AllReduce(refs[n], refs[n + 1], rounded=False) for n in range(CHAIN)]
    return Exchanges.of(ops, world).plan


def test_a_chain_of_sums(where: str, rng: np.random.Generator) -> None:
    """Nobody waits for the host between launches, so ranks run as far apart as they can."""
    backend = open_bare(where, 2)
    for rows in (1, 7):
        plan = chain(2, rows, 5120)
        runner = backend.compile(plan)
        parts = [rng.integers(-3, 4, (rows, 5120)).astype(np.float32) for _ in range(2)]
        for rank in range(2):
            put(runner, rank, "v0", parts[rank])
        us = time_of(backend, runner, LAUNCHES)
        total = parts[0].astype(np.float64) + parts[1]
        for n in (1, 2, 100, CHAIN):
            with np.errstate(over="ignore"):
                want = (total * 2.0 ** (n - 1)).astype(np.float32)
            for rank in range(2):
                assert_same(runner.read(f"v{n}", rank), want, f"sum {n} on rank {rank}")
        report(f"{LAUNCHES * CHAIN:,} x all_reduce of {rows}x5120 f32 on {where}: {us:.2f} us each")


@pytest.mark.parametrize("late", [0, 1])
def test_one_rank_is_always_late(where: str, late: int, rng: np.random.Generator) -> None:
    """It looks for what it gets 20 us after it has sent, so the other is as far ahead as can be."""
    backend = open_bare(where, 2)
    rank = backend.ranks[late]
    rank.exchange = replace(rank.exchange, hop_ns=20_000)
    exchange_all(backend, lengths(2), rng, sized(10, 2), f"{where}, rank {late} late")


def time_of(backend: Any, runner: Any, launches: int = 50) -> float:
    """Microseconds of an exchange: the median of launches that follow each other."""
    from ultraflash.runtime.gpu.driver import Event

    events = [Event() for _ in range(launches + 1)]
    runner.run()
    for event in events:
        event.record(backend.stream)
        runner.launch()
    backend.stream.wait()
    pairs = zip(events[1:], events, strict=False)
    return 1e3 / CHAIN * float(np.median([late.since(early) for late, early in pairs]))


# --- the tiny model on two ranks ---


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


# --- one rank alone ---


@pytest.fixture(scope="module")
def device() -> Any:
    if reason := why_not(SHARED, 1):
        pytest.skip(reason)
    from ultraflash.runtime.gpu.driver import Device

    return Device.open(0)


def emulated(device: Any, weights: Any, world: int, rank: int, hop_us: float) -> Any:
    from ultraflash.runtime.gpu.backend import CudaBackend

    cache = prepare_cache_dir(RuntimeConfig.from_env())
    return CudaBackend.emulated(
        device, weights, cache, world=world, rank=rank, hop_us=hop_us, keep_scratch=True
    )


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (4, 0), (8, 5)])
def test_a_rank_alone_gets_its_own_parts_back(
    device: Any, world: int, rank: int, rng: np.random.Generator
) -> None:
    """World times the same message: the same traffic, and nothing that could be mistaken."""
    exchanges = lengths(world)
    runner = emulated(device, None, world, rank, 0.0).compile(exchanges.plan)
    messages: list[Any] = [node.op for node in exchanges.plan.nodes]
    for _ in range(sized(10, 2)):
        parts = {op.x.name: [message(rng, op.x.shape)] * world for op in messages}
        want = exchanges.want(parts)
        for op in messages:
            runner.poison(op.y)
            runner.write(op.x.name, parts[op.x.name][0])
        runner.run()
        for op in messages:
            assert_same(runner.read(op.y.name), want[op.y.name], str(op))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_hop_takes_its_time(device: Any, world: int) -> None:
    """Looped back, an exchange takes `hop_us` longer than without a hop, within a quarter."""
    us = {}
    for hop in (0.0, 1.0, 2.0, 5.0):
        backend = emulated(device, None, world, 0, hop)
        runner = backend.compile(chain(world, 7, 5120))
        us[hop] = time_of(backend, runner)
    report(
        f"looped back, world {world}, 7x5120 f32: "
        + ", ".join(f"hop {hop:g} us: {took:.2f} us" for hop, took in us.items())
    )
    for hop in (1.0, 2.0, 5.0):
        assert 0.75 * hop <= us[hop] - us[0.0] <= 1.25 * hop + 0.5, us


def test_a_rank_alone_runs_the_model_s_plans(device: Any) -> None:
    """With weights of its part; what it computes means nothing, and it takes no hang to do so."""
    from ultraflash.runtime.gpu.uploader import Uploader
    from ultraflash.runtime.weights.device import upload_weights
    from ultraflash.runtime.weights.index import CheckpointIndex
    from ultraflash.runtime.weights.part import Part as Share

    model, index = Model.from_checkpoint(TINY), CheckpointIndex.open(TINY)
    cache = prepare_cache_dir(RuntimeConfig.from_env())
    with Uploader(device, cache) as uploader:
        weights = upload_weights(index, model, uploader.place, None, cache, Share(2, 1))
    backend = emulated(device, weights, 2, 1, 2.0)
    plan = build_decode(Build(model, Capacity(3, 128), 2, BLOCK), 4, 1)
    runner = backend.compile(plan)
    write_constants(runner)
    write_step(runner, [Part(1, 0, [3, 4, 5, 6])])
    runner.run()
    part, whole = runner.read("head.logits"), runner.read("head.logits_all")
    assert_same(whole, np.concatenate([part, part], axis=1), "gathered logits")
    for _ in range(sized(200, 20)):
        runner.run()
    assert_same(runner.read("head.logits_all"), whole, "a later step's logits")
