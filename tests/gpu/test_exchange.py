"""Exchanges between ranks, to the bit: ranks that share a GPU, ranks on one each, one alone.

A rank that waits for ever would be a hang: `faulthandler` ends the run then and says where it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.device import count, report, sized
from helpers.device_group import (
    SHARED,
    Exchanges,
    assert_same,
    gather,
    message,
    open_bare,
    poison,
    put,
    reduce,
    why_not,
)
from helpers.device_rig import BLOCK, TINY
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.exchange import PIECE
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.plan import Life, Plan, Ref
from ultraflash.graphs.step import Build
from ultraflash.runtime import RuntimeConfig
from ultraflash.runtime.config import prepare_cache_dir
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200), pytest.mark.usefixtures("no_hang")]

REPEATS = count("UF_GPU_EXCHANGES", 300, 20)
CHAIN = 200
LAUNCHES = count("UF_GPU_CHAINS", 500, 50)  # of that many exchanges each


# --- exchanges ---


def lengths(world: int) -> Exchanges:
    """Every way a message may lie: short, ragged, rows, large, in pieces, in slices, short."""
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
            reduce(10, 5, 1 + world * PIECE // 4, rounded=True),
            reduce(11, 1, 3),
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
    """Microseconds of an exchange, in the fastest of launches that follow each other: others may
    use the GPU as well."""
    from ultraflash.runtime.gpu.driver import Event

    events = [Event() for _ in range(launches + 1)]
    runner.run()
    for event in events:
        event.record(backend.stream)
        runner.launch()
    backend.stream.wait()
    pairs = zip(events[1:], events, strict=False)
    return 1e3 / CHAIN * min(late.since(early) for late, early in pairs)


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
    """World times the same message: the same traffic, and nothing that could be mistaken. Where it
    is summed in slices, sums of its own slices."""
    exchanges = lengths(world)
    runner = emulated(device, None, world, rank, 0.0).compile(exchanges.plan)
    messages: list[Any] = [node.op for node in exchanges.plan.nodes]
    for _ in range(sized(10, 2)):
        parts = {op.x.name: [message(rng, op.x.shape)] * world for op in messages}
        want = exchanges.want(parts) | {
            op.y.name: of_slices(op, parts[op.x.name][0], world)
            for op in messages
            if isinstance(op, AllReduce) and op.sliced
        }
        for op in messages:
            runner.poison(op.y)
            runner.write(op.x.name, parts[op.x.name][0])
        runner.run()
        for op in messages:
            assert_same(runner.read(op.y.name), want[op.y.name], str(op))


def of_slices(op: AllReduce, x: Any, world: int) -> Any:
    """What a rank alone makes of a long message: every slice is the sum of all."""
    pairs = -(-x.size // (world * PIECE))
    slices = np.zeros((pairs, world, -(-x.size // (4 * pairs * world)) * 4), np.float32)
    slices.reshape(-1)[: x.size] = x.reshape(-1)
    total = AllReduce.reference(list(slices.transpose(1, 0, 2)), op.rounded)
    every = np.repeat(total[:, None], world, axis=1)
    return every.reshape(-1)[: x.size].reshape(x.shape)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_hop_takes_its_time(device: Any, world: int) -> None:
    """Looped back, an exchange takes at least `hop_us` longer than without a hop.

    How much more is reported: others may use the GPU, too.
    """
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
        assert us[hop] - us[0.0] >= 0.75 * hop, us


def test_a_rank_alone_runs_the_model_s_plans(device: Any) -> None:
    """With weights of its part; what it computes means nothing, and it takes no hang to do so."""
    from ultraflash.runtime.gpu.uploader import Uploader
    from ultraflash.runtime.weights.device import upload_weights
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
