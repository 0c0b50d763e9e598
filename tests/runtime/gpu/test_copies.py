"""State out and back beside steps, in the order that is asked for and in no other.

The driver is a fake that does work as late as waits and events allow: what is not ordered comes too
late here, and shows.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from ultraflash.ptx import ARCHITECTURES
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu import copies
from ultraflash.runtime.gpu.copies import UNIT, Copies, Span
from ultraflash.runtime.gpu.driver import Device, Function, Stream, allocate, download, upload
from ultraflash.runtime.gpu.nvrtc import compile_unit

Bytes = npt.NDArray[np.uint8]
SIZE = 5000


class Bench:
    """Some device memory, a stream of steps that overwrite it, and what is tested."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.device, self.steps = Device.open(), Stream()
        self.address = allocate(SIZE, "state")
        self.fill(1)
        self.step_kernel = Function(b"\0step\0", "step")
        self.value = 1
        cuda.kernels["step"] = 8, self.overwrite
        move = Function(f"\0{UNIT.entry}\0".encode(), UNIT.entry)
        self.copies = Copies(self.device, self.steps, move)

    def fill(self, value: int) -> None:
        upload(self.address, np.full(SIZE, value, np.uint8))

    def overwrite(self, raw: bytes, grid: tuple[int, ...]) -> None:
        ctypes.memset(self.address, raw[0], SIZE)

    def step(self) -> None:
        """Queue a step that overwrites all state."""
        self.value += 1
        self.steps.launch(self.step_kernel, (1, 1, 1), (1, 1, 1), 0, bytes([self.value] * 8))

    def spans(self, *sizes: int) -> list[Span]:
        """One behind the other, a byte between them."""
        starts = np.cumsum([0, *(size + 1 for size in sizes)])[:-1]
        return [Span(self.address + int(a), n) for a, n in zip(starts, sizes, strict=True)]

    def memory(self) -> Bytes:
        whole = np.empty(SIZE, np.uint8)
        download(self.address, whole)
        return whole


@pytest.fixture
def small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LANES", 3)
    monkeypatch.setattr(copies, "LANE_BYTES", 256)


@pytest.fixture(params=[False, True], ids=["at_once", "late"])
def bench(request: pytest.FixtureRequest, cuda: FakeCuda, small_lanes: None) -> Bench:
    made = Bench(cuda)
    cuda.lazy = request.param
    return made


def test_what_was_staged_is_as_it_was(bench: Bench) -> None:
    """Whatever steps follow, and however many lanes it takes."""
    for sizes in ((10,), (0, 3, 256), (100, 156, 1), (1500, 7)):
        want, spans = bench.value, bench.spans(*sizes)
        staged = bench.copies.stage([(b"head", spans)])[0]
        for _ in range(3):
            bench.step()
        assert bytes(staged.take()) == b"head" + bytes([want]) * sum(sizes)
        bench.steps.wait()


def test_many_on_their_way(bench: Bench) -> None:
    """More than there are lanes: each holds the moment at which it was asked for."""
    staged = []
    for _ in range(40):
        staged.append((bench.value, bench.copies.stage([(b"", bench.spans(200, 30))])[0]))
        bench.step()
    for value, one in staged:
        assert one.take() == bytes([value]) * 230


def test_nothing_is_there_before_the_copy(cuda: FakeCuda, small_lanes: None) -> None:
    bench, gate = Bench(cuda), threading.Event()
    happened = cuda.cuEventSynchronize

    def held(event: Any) -> tuple[Any, ...]:
        gate.wait()
        return happened(event)

    cuda.cuEventSynchronize = held  # type: ignore[method-assign]
    staged = bench.copies.stage([(b"", bench.spans(300))])[0]
    assert not staged.wait(0)
    assert not staged.wait(0.01)
    gate.set()
    assert staged.wait()
    assert staged.take() == bytes([1]) * 300


def test_bytes_may_not_be_written_to(bench: Bench) -> None:
    data = bench.copies.stage([(b"", bench.spans(20))])[0].take()
    assert data.readonly
    with pytest.raises(TypeError):
        data[0] = 3


def test_staging_comes_before_the_next_step(cuda: FakeCuda, small_lanes: None) -> None:
    """On the stream of the steps; one launch however many rows there are, up to its limit."""
    bench = Bench(cuda)
    bench.copies.stage([(b"", bench.spans(*[1] * 170))])[0].take()
    bench.step()
    bench.copies.stage([(b"", bench.spans(*[1] * 171))])[0].take()
    assert [launch[0] for launch in cuda.launches] == [
        "uf_move_rows",
        "step",
        *["uf_move_rows"] * 2,
    ]
    assert [launch[1][0] for launch in cuda.launches] == [170, 1, 170, 1]


def test_back_again(bench: Bench, rng: np.random.Generator) -> None:
    """Steps queued before it come first, steps queued after it see it; what is beside it stays."""
    sizes = (300, 0, 256, 7, 500)
    spans = bench.spans(*sizes)
    data = [rng.integers(0, 256, n).astype(np.uint8).tobytes() for n in sizes]
    bench.step()
    bench.copies.restore(spans, [memoryview(d) for d in data])
    bench.steps.wait()
    want = np.full(SIZE, 2, np.uint8)
    for (address, size), part in zip(spans, data, strict=True):
        at = address - bench.address
        want[at : at + size] = np.frombuffer(part, np.uint8)
    np.testing.assert_array_equal(bench.memory(), want)
    assert bench.copies.stage([(b"", spans)])[0].take() == b"".join(data)
    bench.step()
    bench.steps.wait()
    assert (bench.memory() == 3).all()


def test_the_next_step_waits_for_a_restore(cuda: FakeCuda, small_lanes: None) -> None:
    """A step that is waited for has brought everything before it about, and in order."""
    bench = Bench(cuda)
    cuda.lazy = True
    bench.copies.restore(bench.spans(900), [bytes([9]) * 900])
    bench.step()
    bench.steps.wait()
    assert (bench.memory() == 2).all(), "the restored bytes came after the step"


def test_out_and_back_at_once(bench: Bench) -> None:
    """A conversation leaves while another one comes: the same lanes, nothing mixed up."""
    for n in range(20):
        want = bench.value
        out = bench.copies.stage([(b"", bench.spans(700))])[0]
        bench.copies.restore([Span(bench.address + 4000, 600)], [bytes([100 + n]) * 600])
        staged = bench.copies.stage([(b"", [Span(bench.address + 4000, 600)])])[0]
        bench.step()
        assert staged.take() == bytes([100 + n]) * 600
        assert out.take() == bytes([want]) * 700


@pytest.mark.parametrize("act", ["stage", "restore"])
def test_a_copy_that_fails_says_so(cuda: FakeCuda, small_lanes: None, act: str) -> None:
    bench = Bench(cuda)
    lost = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    acts: dict[str, Callable[[], Any]] = {
        "stage": lambda: bench.copies.stage([(b"", bench.spans(20))])[0].take(),
        "restore": lambda: bench.copies.restore(bench.spans(20), [bytes(20)]),
    }
    cuda.fail["cuEventSynchronize" if act == "stage" else "cuMemcpyHtoDAsync"] = lost
    with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        acts[act]()


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernel_compiles(arch: str, kernel_cache: Path) -> None:
    kernel = compile_unit(UNIT, arch, kernel_cache)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert 0 < kernel.registers <= 64
    assert f"\0{UNIT.entry}\0".encode() in kernel.cubin
    check = f'static_assert(sizeof(Args) == {copies._PIECES * 24}, "");'
    assert compile_unit(replace(UNIT, declaration=UNIT.declaration + check), arch, kernel_cache)
