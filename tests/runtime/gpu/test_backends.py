"""Which backend a machine gets: by what it has and what was asked for; what is said if neither."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda, Gpu
from helpers.rig import TINY
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Backend
from ultraflash.runtime.backends import num_gpus, open_backend
from ultraflash.runtime.config import RuntimeConfig
from ultraflash.runtime.errors import ConfigError, DeviceError, EngineError
from ultraflash.runtime.gpu.backend import CudaBackend
from ultraflash.runtime.gpu.driver import upload
from ultraflash.runtime.gpu.runner import CudaRunner
from ultraflash.runtime.gpu.uploader import BUFFER_BYTES, BUFFERS
from ultraflash.runtime.interpret import NumpyBackend
from ultraflash.runtime.step_io import Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex

needs_compiler = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


@pytest.fixture
def opened(kernel_cache: Path) -> Callable[..., Backend]:
    """The tiny checkpoint on whatever `settings` choose."""

    def opened(**settings: object) -> Backend:
        config = RuntimeConfig(TINY, cache_dir=kernel_cache, **settings)  # type: ignore[arg-type]
        model = Model.from_checkpoint(TINY)
        return open_backend(config, CheckpointIndex.open(TINY), model, keep_scratch=True)

    return opened


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the extra `cuda` is not installed."""
    for name in ("ultraflash.runtime.gpu.driver", "ultraflash.runtime.gpu.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda", None)


def sentence(kind: type[EngineError], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_auto_without_a_driver_takes_numpy(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.library = False
    assert num_gpus() == 0
    assert isinstance(opened(), NumpyBackend)


@pytest.mark.usefixtures("no_bindings")
def test_auto_without_the_bindings_takes_numpy(opened: Callable[..., Backend]) -> None:
    assert num_gpus() == 0
    assert isinstance(opened(), NumpyBackend)


def test_auto_with_a_gpu_that_has_no_kernels_takes_numpy(
    cuda: FakeCuda, opened: Callable[..., Backend]
) -> None:
    """A workstation's GPU is no reason not to run: nobody asked for it."""
    cuda.gpus = (Gpu("NVIDIA GeForce RTX 4090", (8, 9)),)
    assert num_gpus() == 0
    assert isinstance(opened(), NumpyBackend)


@needs_compiler  # of weights' layouts
def test_auto_takes_a_gpu_and_numpy_can_be_asked_for(
    cuda: FakeCuda, opened: Callable[..., Backend]
) -> None:
    assert num_gpus() == 1
    backend = opened()
    assert isinstance(backend, CudaBackend)
    assert (backend.arch, backend.world) == ("sm_90a", 1)
    assert isinstance(opened(backend="numpy"), NumpyBackend)


def test_auto_on_a_gpu_with_an_old_driver_says_so(
    cuda: FakeCuda, opened: Callable[..., Backend]
) -> None:
    """NumPy in its place would run, a thousand times slower, and nobody would know why."""
    cuda.version = 12080
    assert "update the driver" in sentence(DeviceError, opened)


def test_cuda_without_a_driver(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.library = False
    text = sentence(DeviceError, lambda: opened(backend="cuda"))
    assert text.startswith("GPU 0 was asked for, but there is no NVIDIA driver")


@pytest.mark.usefixtures("no_bindings")
def test_cuda_without_the_bindings(opened: Callable[..., Backend]) -> None:
    text = sentence(ConfigError, lambda: opened(backend="cuda"))
    assert text.startswith("running on a GPU needs the CUDA bindings (")
    assert text.endswith("pip install 'ultraflash[cuda]'")


@needs_compiler  # of weights' layouts
def test_another_gpu_than_the_first(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.gpus = Gpu(), Gpu("NVIDIA B300", (10, 3))
    assert opened(gpus=(1,)).arch == "sm_103a"


def test_weights_that_do_not_fit(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    cuda.gpus = (Gpu(total_bytes=BUFFERS * BUFFER_BYTES + (1 << 20)),)
    text = sentence(DeviceError, opened)
    assert "of GPU memory" in text


@needs_compiler
def test_a_step_from_io_to_io(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    """With kernels that do nothing: what is launched, captured once, replayed, and copied."""
    backend = opened()
    assert isinstance(backend, CudaBackend)
    layouts = {launch[0] for launch in cuda.launches}
    assert layouts == {"uf_tiles", "uf_fp4_tiles", "uf_fp4_scales"}, "weights are laid out"
    cuda.launches.clear()
    model = Model.from_checkpoint(TINY)
    plan = build_decode(Build(model, Capacity(3, 64), block=model.draft_block), 3, 1)
    runner = backend.compile(plan)
    write_constants(runner)
    write_step(runner, [Part(1, 5, [7, 8, 9])])
    cuda.launches.clear()  # of loading
    for run in (1, 2):
        runner.run()
        assert cuda.graph_launches == run
        steps = [f"uf_{node.op.stem()}" for node in plan.nodes]
        assert [launch[0] for launch in cuda.launches] == [
            "uf_copy_words", *steps, "uf_copy_words"
        ] * run  # fmt: skip
    assert runner.nodes == len(plan.nodes) + 2
    np.testing.assert_array_equal(runner.read("io.follows"), [-1])
    runner.run(slice(0, 4))
    assert cuda.graph_launches == 2
    assert len(cuda.launches) == 2 * (len(plan.nodes) + 2) + 4 + 2


@needs_compiler
@pytest.mark.parametrize("eager", [False, True])
def test_a_step_is_queued_before_the_record_in_front_of_it_is_read(
    cuda: FakeCuda, opened: Callable[..., Backend], eager: bool
) -> None:
    """On a driver that does nothing before somebody waits for it. Every step counts one token up;
    each record stays in its place until the place is used again.
    """
    backend = opened(eager=eager)
    plan = build_decode(Build(Model.from_checkpoint(TINY), Capacity(3, 64)), 1, 1)
    runner = backend.compile(plan)
    assert isinstance(runner, CudaRunner)
    count, brought_in = np.zeros(1, np.int64), runner._io_base + runner._place_at[0]

    def next_rows(raw: bytes, grid: tuple[int, ...]) -> None:
        count[0] += 1
        upload(runner._io_at["io.token"], count.astype(np.int32))

    def copy_words(raw: bytes, grid: tuple[int, ...]) -> None:
        x, y, times, words = struct.unpack_from("<QQQi", raw)
        ctypes.memmove(y, x, 8 * words)
        began_ended = np.array([10, 11] if y == brought_in else [20, 21]) + count
        ctypes.memmove(times, began_ended.ctypes.data, 16)

    cuda.kernels |= {"uf_next_rows": (0, next_rows), "uf_copy_words": (40, copy_words)}
    runner.run()
    assert runner.read("io.token").tolist() == [1]
    cuda.lazy = True
    runner.launch(0)
    for step in range(2, 6):
        runner.launch((step + 1) % 2)
        runner.wait(step % 2)
        assert count == step, "the one behind it has not begun"
        assert runner.read("io.token").tolist() == [step]
        assert runner.times_ns == (10 + step - 1, 21 + step)
    runner.wait(1 - step % 2)
    assert runner.read("io.token").tolist() == [6]


@needs_compiler
def test_state_and_scratch_are_read_as_they_were_written(
    cuda: FakeCuda, opened: Callable[..., Backend], rng: np.random.Generator
) -> None:
    backend = opened()
    assert isinstance(backend, CudaBackend)
    plan = build_decode(Build(Model.from_checkpoint(TINY), Capacity(3, 64)), 2, 1)
    runner = backend.compile(plan)
    for ref in plan.of_life(Life.SCRATCH):
        if ref.dtype == "bf16":
            value = rng.integers(-100, 100, ref.shape).astype(np.float32)
            runner.write(ref.name, value)
            np.testing.assert_array_equal(runner.read(ref.name), value)
    for ref in plan.of_life(Life.STATE):
        if ref.name.startswith("next."):
            continue  # fewer rows than are written here
        assert not backend.read_state(ref.name, 1, 0, ref.shape[1]).any(), "state begins as zeros"
        rows = rng.integers(0, 100, (3, *ref.shape[2:]))
        backend.write_state(ref.name, 1, 4, rows)
        np.testing.assert_array_equal(backend.read_state(ref.name, 1, 4, 7), rows)
        assert not backend.read_state(ref.name, 2, 0, ref.shape[1]).any()
        backend.clear_slot(1)
        assert not backend.read_state(ref.name, 1, 0, ref.shape[1]).any()


@needs_compiler
def test_what_a_plan_does_not_have(cuda: FakeCuda, opened: Callable[..., Backend]) -> None:
    backend = opened()
    assert isinstance(backend, CudaBackend)
    model = Model.from_checkpoint(TINY)
    runner = backend.compile(build_decode(Build(model, Capacity(3, 64)), 2, 1))
    for act, words in (
        (lambda: runner.read("io.idz"), "plan decode has no buffer 'io.idz'"),
        (lambda: runner.write("embed", np.zeros(1)), "no io or scratch buffer 'embed'"),
        (lambda: runner.write("io.ids", np.zeros(3)), "cannot take an array of shape (3,)"),
        (
            lambda: backend.read_state("L0.ring", 0, 0, 1),
            "no plan has named a state buffer 'L0.ring'",
        ),
        (
            lambda: backend.compile(build_decode(Build(model, Capacity(4, 64)), 2, 1)),
            "all plans need the same capacity",
        ),
        (
            lambda: backend.compile(build_decode(Build(model, Capacity(3, 64), world=2), 2, 1)),
            "is for world 2, this backend has 1 ranks",
        ),
    ):
        assert words in sentence(DeviceError, act)
