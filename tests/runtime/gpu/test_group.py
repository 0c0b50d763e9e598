"""Several GPUs as one backend, with a driver made of host memory: whose call reaches which GPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import copy_bundled
from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda, Gpu
from helpers.rig import TINY
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.errors import WorldError
from ultraflash.graphs.exchange import PIECE
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan
from ultraflash.graphs.step import Build
from ultraflash.runtime import RuntimeConfig
from ultraflash.runtime.backend import Backend, Rows
from ultraflash.runtime.backends import open_backend
from ultraflash.runtime.errors import ConfigError, DeviceError, EngineError, WeightsError
from ultraflash.runtime.gpu.backend import CudaBackend
from ultraflash.runtime.gpu.driver import Device, download
from ultraflash.runtime.gpu.exchange import Exchange
from ultraflash.runtime.gpu.group import GroupBackend
from ultraflash.runtime.gpu.uploader import Uploader
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.device import upload_weights
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.layout import SCALED, layout_of, scales_layout_of
from ultraflash.runtime.weights.load import load_weights
from ultraflash.runtime.weights.part import Part as Share
from ultraflash.runtime.weights.table import weight_table
from ultraflash.tools.load_weights import main

needs_compiler = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
TWO = Gpu(), Gpu()
FIRST, SECOND = "context of GPU 0", "context of GPU 1"


@pytest.fixture
def opened(kernel_cache: Path) -> Callable[..., Backend]:
    """The tiny checkpoint on GPUs, two unless `settings` say otherwise."""

    def opened(checkpoint: Path = TINY, **settings: object) -> Backend:
        settings = {"world": 2, "gpus": (0, 1), "backend": "cuda", **settings}
        config = RuntimeConfig(checkpoint, cache_dir=kernel_cache, **settings)  # type: ignore[arg-type]
        model = Model.from_checkpoint(checkpoint)
        return open_backend(config, CheckpointIndex.open(checkpoint), model, keep_scratch=True)

    return opened


@pytest.fixture
def group(cuda: FakeCuda, opened: Callable[..., Backend]) -> GroupBackend:
    cuda.gpus = TWO
    backend = opened()
    assert isinstance(backend, GroupBackend)
    cuda.launches.clear()  # of loading
    return backend


def sentence(kind: type[Exception], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plan(rows: int = 3, world: int = 2) -> Plan:
    model = Model.from_checkpoint(TINY)
    return build_decode(Build(model, Capacity(3, 64), world, model.draft_block), rows, 1)


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpus": (0,)}, "world 2 takes as many GPUs, and 1 are named (0)"),
        ({"world": 1}, "world 1 takes as many GPUs, and 2 are named (0,1)"),
        ({"world": 1, "gpus": ()}, "world 1 takes as many GPUs, and 0 are named (none)"),
        ({"gpus": (1, 1)}, "every rank needs a GPU of its own, and --gpus names one twice: 1,1"),
    ],
)
def test_worlds_and_gpus_that_do_not_match(
    cuda: FakeCuda, opened: Callable[..., Backend], settings: dict[str, object], words: str
) -> None:
    cuda.gpus = TWO
    assert sentence(ConfigError, lambda: opened(**settings)).startswith(words)
    assert not cuda.allocated


def test_two_gpus_asked_for_and_one_there(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    text = sentence(DeviceError, opened)
    assert text.startswith("GPU 1 was asked for and 1 are there: check nvidia-smi, or run on the")


def test_a_world_that_does_not_divide(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.gpus = TWO + TWO
    text = sentence(WorldError, lambda: opened(world=3, gpus=(0, 1, 2)))
    assert "attention heads (8)" in text
    assert text.endswith("can be split over [1, 2]")
    assert not cuda.allocated


def test_gpus_of_two_kinds(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.gpus = Gpu(), Gpu("NVIDIA B300", (10, 3))
    text = sentence(DeviceError, opened)
    assert text.startswith("one architecture is needed, GPU 0 is sm_90a, GPU 1 is sm_103a")


def test_gpus_without_a_link(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.gpus, cuda.linked = TWO, False
    assert sentence(DeviceError, opened).startswith("GPU 0 cannot reach the memory of GPU 1: ")


def test_more_than_a_kernel_has_room_for() -> None:
    assert sentence(DeviceError, lambda: GroupBackend.join([None] * 9, [], Path())) == (  # type: ignore[list-item]
        "1 to 8 GPUs can work together, got 9"
    )


@needs_compiler
def test_plans_of_another_world(group: GroupBackend) -> None:
    text = sentence(DeviceError, lambda: group.compile(plan(world=1)))
    assert text == "plan decode is for world 1, this backend has 2 ranks"


def test_a_program_for_one_gpu_refuses_two(cuda: FakeCuda) -> None:
    cuda.gpus = TWO
    model, index = Model.from_checkpoint(TINY), CheckpointIndex.open(TINY)
    config = RuntimeConfig(TINY, world=2, gpus=(0, 1))
    text = sentence(ConfigError, lambda: CudaBackend.open(config, index, model))
    assert text == "one GPU is used here, UF_GPUS names 2: name one"


# --- weights ---


def test_each_rank_holds_its_part_of_every_weight(group: GroupBackend) -> None:
    """The checkpoint's own bytes, of the shapes that the interpreter's loader gives a rank."""
    model, index = Model.from_checkpoint(TINY), CheckpointIndex.open(TINY)
    host = load_weights(index, model, 2)
    split = compared = 0
    for row in weight_table(model).values():
        for rank, backend in enumerate(group.ranks):
            shape = host.host(row.name, rank).shape
            assert Share(2, rank).shape(row) == shape
            assert backend._weights._held[row.name][0] == shape
            split += shape != row.shape
            addresses = backend._weights._held[row.name][1]
            step = len(addresses) if row.format in SCALED else 1
            for at, sources in zip(
                addresses, (row.sources[n::step] for n in range(2)), strict=False
            ):
                codes = at == addresses[0]
                if layout_of(row.name, row.format) if codes else scales_layout_of(row.format):
                    continue  # laid out by a kernel, which does nothing here
                for number, source in enumerate(sources):
                    want = Share(2, rank).stored(index, row, source)
                    got = np.empty(want.shape, want.dtype)
                    download(at + number * want.nbytes, got)
                    np.testing.assert_array_equal(got, want)
                    compared += 1
    assert split
    assert compared > 100


def test_parts_side_by_side_are_the_whole() -> None:
    model, index = Model.from_checkpoint(TINY), CheckpointIndex.open(TINY)
    for row in weight_table(model).values():
        for source in row.sources:
            parts = [Share(2, rank).stored(index, row, source) for rank in range(2)]
            whole = index.raw(source)
            axis = next((i for i, n in enumerate(whole.shape) if parts[0].shape[i] != n), None)
            assert (axis is None) == (row.axis is None)
            joined = parts[0] if axis is None else np.concatenate(parts, axis)
            assert joined.tobytes() == whole.tobytes(), source


def test_progress_counts_what_all_ranks_load(cuda: FakeCuda, kernel_cache: Path) -> None:
    cuda.gpus = TWO
    seen: list[tuple[int, int]] = []
    config = RuntimeConfig(TINY, world=2, gpus=(0, 1), backend="cuda", cache_dir=kernel_cache)
    model, index = Model.from_checkpoint(TINY), CheckpointIndex.open(TINY)
    open_backend(config, index, model, lambda *done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == (2 * seen[len(seen) // 2 - 1][0], seen[0][1])
    assert seen[-1][0] == seen[-1][1]


def test_a_folder_of_parts_is_refused(
    cuda: FakeCuda, opened: Callable[..., Backend], tmp_path: Path
) -> None:
    folder = copy_bundled(tmp_path / "whole")
    assert main([str(folder), "--world", "2", "--shard", str(tmp_path / "parts")]) == 0
    part = CheckpointIndex.open(
        next(p for p in sorted((tmp_path / "parts").iterdir()) if "0" in p.name)
    )
    text = sentence(
        WeightsError,
        lambda: upload_weights(part, Model.from_checkpoint(folder), lambda *what: 0),
    )
    assert "is rank 0 of a checkpoint pre-sharded for 2 ranks: give the folder" in text


# --- steps ---


def test_gpus_reach_each_other(cuda: FakeCuda, group: GroupBackend) -> None:
    assert sorted(cuda.reached) == [(FIRST, SECOND), (SECOND, FIRST)]
    first, second = (rank.device for rank in group.ranks)
    first.reach(second)  # once more is no error
    assert cuda.current == FIRST
    assert (group.world, group.arch, group.device.ordinal) == (2, "sm_90a", 0)
    assert group.facts() == group.ranks[1].facts()


def test_inboxes_begin_empty_and_everybody_knows_them(group: GroupBackend) -> None:
    one, two = (rank.exchange for rank in group.ranks)
    assert one is not None
    assert two is not None
    assert one.inboxes == two.inboxes
    assert (one.rank, two.rank, one.hop_ns, two.hop_ns) == (0, 1, 0, 0)
    for address in one.inboxes:
        words = np.zeros(3 * 2 * PIECE, np.uint32)
        download(address, words)
        assert (words == 0xFFFFFFFF).all()


@needs_compiler
def test_a_step_is_one_graph_over_both_gpus(cuda: FakeCuda, group: GroupBackend) -> None:
    """The fake driver refuses a stream while another GPU is current, and one that never joins."""
    runner = group.compile(plan())
    write_constants(runner)
    write_step(runner, [Part(1, 5, [7, 8, 9])])
    for run in (1, 2):
        runner.run()
        assert cuda.graph_launches == run
        # Every rank copies io in, the first one the record out.
        assert len(cuda.launches) == run * (2 * len(runner.plan.nodes) + 3)
    assert runner.nodes == 2 * (len(runner.plan.nodes) + 1) + 1  # nobody but rank 0 copies out
    np.testing.assert_array_equal(runner.read("io.follows"), [-1])
    assert cuda.current == FIRST


@needs_compiler
def test_node_by_node_all_ranks_begin_before_anybody_waits(
    cuda: FakeCuda, group: GroupBackend
) -> None:
    runner = group.compile(plan())
    runner.run(slice(2, 4))
    stems = [node.op.stem() for node in runner.plan.nodes[2:4]]
    nodes = [f"uf_{s}" for s in stems for _ in range(2)]
    copies = ["uf_copy_words"]
    assert [launch[0] for launch in cuda.launches] == [*copies * 2, *nodes, *copies]
    assert cuda.graph_launches == 0


@needs_compiler
def test_checked_steps_name_the_rank_s_node(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.gpus = TWO
    runner = opened(check=True).compile(plan())
    ref = next(r for r in runner.plan.nodes[1].op.writes() if r.dtype in ("bf16", "f32"))
    runner.write(ref.name, np.full(ref.shape, np.nan, np.float32))
    assert f"wrote NaN into {ref}" in sentence(DeviceError, runner.run)


@needs_compiler
def test_state_is_read_from_the_first_and_written_to_all(
    group: GroupBackend, rng: np.random.Generator
) -> None:
    runner = group.compile(plan())
    ref = next(r for r in runner.plan.of_life(Life.STATE) if "ring" in r.name)
    rows = rng.integers(1, 100, (3, *ref.shape[2:]))
    group.write_state(ref.name, 1, 4, rows)
    np.testing.assert_array_equal(group.read_state(ref.name, 1, 4, 7), rows)
    for rank in range(2):
        held = runner.read(ref.name, rank)
        np.testing.assert_array_equal(held[1, 4:7], rows)
        assert np.count_nonzero(held) == np.count_nonzero(rows)
    group.clear_slot(1)
    assert not any(runner.read(ref.name, rank).any() for rank in range(2))


@needs_compiler
def test_scratch_is_each_rank_s_own(group: GroupBackend, rng: np.random.Generator) -> None:
    runner = group.compile(plan())
    ref = next(r for r in runner.plan.of_life(Life.SCRATCH) if r.dtype == "bf16")
    value = rng.integers(-100, 100, ref.shape).astype(np.float32)
    runner.write(ref.name, value)
    for rank in range(2):
        np.testing.assert_array_equal(runner.read(ref.name, rank), value)
    assert "no buffer 'io.idz'" in sentence(DeviceError, lambda: runner.read("io.idz"))
    assert "no buffer 'io.idz'" in sentence(DeviceError, lambda: runner.read("io.idz", 1))
    assert "no io or scratch" in sentence(DeviceError, lambda: runner.write("io.idz", value))


@needs_compiler
def test_state_leaves_from_one_rank_and_comes_back_to_all(
    group: GroupBackend, rng: np.random.Generator
) -> None:
    runner = group.compile(plan())
    refs = [r for r in runner.plan.of_life(Life.STATE) if r.shape[1] >= 9]
    for ref in refs:
        group.write_state(ref.name, 1, 0, rng.integers(0, 100, ref.shape[1:]))
    rows = [Rows(ref.name, 3, 9) for ref in refs]
    (staged,) = group.stage(1, [(b"head", rows)])
    data = staged.take()
    assert bytes(data[:4]) == b"head"
    group.restore(2, [(rows, data[4:])])
    for ref in refs:
        want = group.read_state(ref.name, 1, 3, 9)
        for rank in group.ranks:
            rank.device.enter()
            np.testing.assert_array_equal(rank.read_state(ref.name, 2, 3, 9), want)
        group.device.enter()


# --- one rank alone ---


@pytest.fixture
def alone(cuda: FakeCuda, kernel_cache: Path) -> CudaBackend:
    model, index = Model.from_checkpoint(TINY), CheckpointIndex.open(TINY)
    device, share = Device.open(), Share(2, 1)
    with Uploader(device, kernel_cache) as uploader:
        weights = upload_weights(index, model, uploader.place, None, kernel_cache, share)
    cuda.launches.clear()  # of loading
    return CudaBackend.emulated(device, weights, kernel_cache, world=2, rank=1, hop_us=1.5)


@needs_compiler
def test_one_rank_of_an_emulated_world_runs_its_plans(cuda: FakeCuda, alone: CudaBackend) -> None:
    runner = alone.compile(plan())
    runner.run()
    assert len(cuda.launches) == len(runner.plan.nodes) + 2
    assert alone.world == 2
    text = sentence(DeviceError, lambda: alone.compile(plan(world=1)))
    assert text == "plan decode is for world 1, this backend has 2 ranks"


def test_an_emulated_rank_cannot_become_an_engine(alone: CudaBackend) -> None:
    """The engine's fingerprint asks for the backend's facts before anything is served."""
    text = sentence(DeviceError, alone.facts)
    assert text.startswith("rank 1 of an emulated world of 2 adds up its own parts alone")
    assert issubclass(DeviceError, EngineError)


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2), (8, 7)])
def test_everything_that_an_emulated_rank_sends_comes_back(
    cuda: FakeCuda, world: int, rank: int
) -> None:
    """Where a kernel writes for rank r is where it reads what rank r sent."""
    exchange = Exchange.loop_back(world, rank, 2.0)
    raw = exchange.pack(turn=4)
    *inboxes, number, size, stage, capacity, hop_ns = struct.unpack("<8Q5i", raw[:84])
    assert (number, size, stage, capacity, hop_ns) == (rank, world, 1, PIECE, 2000)
    own = inboxes[rank]
    place = 4 * PIECE
    for r in range(world):
        sent = inboxes[r] + (stage * world + rank) * place
        assert sent == own + (stage * world + r) * place
    assert inboxes[world:] == [0] * (8 - world)


@pytest.mark.parametrize(
    ("world", "rank", "hop_us", "words"),
    [
        (9, 0, 2.0, "1 to 8 GPUs can work together, got 9"),
        (2, 2, 2.0, "there is no rank 2 in a world of 2"),
        (2, 0, -1.0, "a hop takes 0 to 1,000,000 us, got -1.0"),
    ],
)
def test_emulated_worlds_that_cannot_be(
    cuda: FakeCuda, world: int, rank: int, hop_us: float, words: str
) -> None:
    assert sentence(DeviceError, lambda: Exchange.loop_back(world, rank, hop_us)) == words
