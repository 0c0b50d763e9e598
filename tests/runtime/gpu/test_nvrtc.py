"""Compilation and its cache on disk: what makes a key, and that half a file is never a kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from ultraflash import ptx
from ultraflash.runtime.errors import CompileError, ConfigError
from ultraflash.runtime.gpu import nvrtc
from ultraflash.runtime.gpu.nvrtc import Kernel, Unit, compile_unit, compile_units

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())

TOY = """// A toy.
#include <uf/add.cuh>

extern "C" __global__ void uf_toy(const Args a) { a.y[threadIdx.x] = add(a.y[threadIdx.x]); }
"""
UNIT = Unit("toy", "struct Args { int* y; };\n")
ARCH = "sm_90a"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A room of kernels of our own."""
    folder = tmp_path / "ptx"
    (folder / "uf").mkdir(parents=True)
    (folder / "uf" / "types.cuh").write_text("// Nothing.\n")
    (folder / "uf" / "add.cuh").write_text("__device__ int add(int x) { return x + 1; }\n")
    (folder / "toy.cu").write_text(TOY)
    monkeypatch.setattr(ptx, "FOLDER", folder)
    ptx.source.cache_clear()
    yield folder
    ptx.source.cache_clear()


@pytest.fixture
def cache(folder: Path, tmp_path: Path) -> Path:
    return tmp_path / "cache"


def compiled(cache: Path, unit: Unit = UNIT, arch: str = ARCH) -> Kernel:
    ptx.source.cache_clear()
    return compile_unit(unit, arch, cache)


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_kernel_comes_from_the_cache_the_second_time(cache: Path) -> None:
    first, second = compiled(cache), compiled(cache)
    assert (first.cached, second.cached) == (False, True)
    assert (first.cubin, first.log) == (second.cubin, second.log)
    assert first.cubin.startswith(b"\x7fELF")
    assert b"uf_toy" in first.cubin
    assert len(entries(cache)) == 1


def test_what_the_compiler_says_is_kept(cache: Path) -> None:
    for kernel in (compiled(cache), compiled(cache)):
        assert 0 < kernel.registers < 32
        assert (kernel.spill_bytes, kernel.shared_bytes, kernel.stack_bytes) == (0, 0, 0)
        assert not kernel.silent
        assert replace(kernel, log="").silent


def test_figures_of_a_kernel_that_spills(folder: Path, cache: Path) -> None:
    """What the test over all kernels looks for, on a kernel that has it."""
    (folder / "toy.cu").write_text(
        """
extern "C" __global__ void __launch_bounds__(1024, 2) uf_toy(const Args a) {
    __shared__ int seen[100];
    int x[96];
#pragma unroll
    for (int i = 0; i < 96; i++) x[i] = a.y[i];
    seen[threadIdx.x % 100] = x[0];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; i++) a.y[96 + i] = x[95 - i] * x[i] + seen[i];
}
"""
    )
    for kernel in (compiled(cache), compiled(cache)):
        assert kernel.spill_bytes > 0
        assert kernel.stack_bytes > 0
        assert kernel.shared_bytes == 400
        assert kernel.registers == 32


@pytest.mark.parametrize(
    "changed", ["source", "header", "declaration", "arch", "options", "version"]
)
def test_every_ingredient_is_part_of_the_key(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    compiled(cache)
    unit, arch = UNIT, ARCH
    if changed == "source":
        (folder / "toy.cu").write_text(TOY.replace("A toy", "The toy"))
    elif changed == "header":
        (folder / "uf" / "add.cuh").write_text("__device__ int add(int x) { return x + 2; }\n")
    elif changed == "declaration":
        unit = Unit("toy", "struct Args { int* y; int n; };\n")
    elif changed == "arch":
        arch = "sm_100a"
    elif changed == "options":
        monkeypatch.setattr(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, "--use_fast_math"))
    else:
        monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    assert not compiled(cache, unit, arch).cached
    assert len(entries(cache)) == 2
    assert compiled(cache, unit, arch).cached


def damaged(raw: bytes) -> dict[str, bytes]:
    middle = len(raw) // 2
    return {
        "empty": b"",
        "only the hash": raw[:32],
        "half": raw[:middle],
        "a byte short": raw[:-1],
        "a byte long": raw + b"\0",
        "a bit flipped": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
        "another hash": bytes([raw[0] ^ 1]) + raw[1:],
        "zeros": bytes(len(raw)),
    }


@pytest.mark.parametrize("how", damaged(b"any bytes"))
def test_a_damaged_entry_is_compiled_again_and_put_right(cache: Path, how: str) -> None:
    good = compiled(cache)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    entry.write_bytes(damaged(whole)[how])
    again = compiled(cache)
    assert not again.cached
    assert again.cubin == good.cubin
    assert compiled(cache).cached
    assert entries(cache) == [entry]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_interrupted_write_leaves_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled(cache)
    assert entries(cache) == []
    assert not compiled(cache).cached


def test_nothing_appears_under_its_name_before_it_is_synced(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        call = getattr(os, name)

        def noting(*arguments: object) -> None:
            order.append(name)
            call(*arguments)

        return noting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    compiled(cache)
    assert order == ["fsync", "replace"]


def test_compilers_side_by_side_leave_one_whole_entry(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All find nothing, all compile, all write: as processes that start together do."""
    count = 6
    barrier, compile_ = threading.Barrier(count), nvrtc._compile

    def together(stem: str, arch: str, text: str) -> Kernel:
        barrier.wait(60)
        return compile_(stem, arch, text)

    monkeypatch.setattr(nvrtc, "_compile", together)
    ptx.source.cache_clear()
    with ThreadPoolExecutor(count) as pool:
        kernels = list(pool.map(lambda _: compile_unit(UNIT, ARCH, cache), range(count)))
    assert [kernel.cached for kernel in kernels] == [False] * count
    assert {kernel.cubin for kernel in kernels} == {kernels[0].cubin}
    assert len(entries(cache)) == 1
    assert compiled(cache).cubin == kernels[0].cubin


def test_units_are_compiled_once_each_and_come_back_in_order(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "other.cu").write_text(TOY.replace("uf_toy", "uf_other"))
    ptx.source.cache_clear()
    other = Unit("other", UNIT.declaration)
    seen, compile_ = [], nvrtc._compile

    def noting(stem: str, arch: str, text: str) -> Kernel:
        seen.append(stem)
        return compile_(stem, arch, text)

    monkeypatch.setattr(nvrtc, "_compile", noting)
    kernels = compile_units([other, UNIT, other, UNIT], ARCH, cache, threads=3)
    assert list(kernels) == [other, UNIT]
    assert sorted(seen) == ["other", "toy"]
    assert all(unit.entry.encode() in kernel.cubin for unit, kernel in kernels.items())
    assert compile_units([], ARCH, cache) == {}


def test_a_kernel_that_does_not_compile_says_where(folder: Path, cache: Path) -> None:
    (folder / "uf" / "add.cuh").write_text("\n__device__ int add(int x) { return x +; }\n")
    with pytest.raises(CompileError) as caught:
        compiled(cache)
    error = caught.value
    assert (error.stem, error.arch) == ("toy", ARCH)
    assert "uf/add.cuh(2): error: expected an expression" in error.log
    assert str(error).startswith("toy does not compile for sm_90a:\n")
    assert error.log in str(error)
    assert entries(cache) == []


def test_one_that_does_not_compile_stops_all(folder: Path, cache: Path) -> None:
    (folder / "broken.cu").write_text("this is no kernel")
    ptx.source.cache_clear()
    with pytest.raises(CompileError, match="broken does not compile for sm_100a"):
        compile_units([UNIT, Unit("broken", ""), UNIT], "sm_100a", cache)


def test_an_architecture_that_the_compiler_does_not_know(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ptx, "_VARIANTS", {"sm_17a": ()})
    with pytest.raises(CompileError, match="toy does not compile for sm_17a"):
        compiled(cache, arch="sm_17a")


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*: make room .* UF_CACHE_DIR"):
        compiled(cache)


def test_no_compiler_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise RuntimeError("libnvrtc not found")

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", absent)
    with pytest.raises(ConfigError, match=r"NVRTC, and libnvrtc.so was not found: pip install"):
        nvrtc.version()


def test_the_compiler_is_the_one_that_is_pinned() -> None:
    assert nvrtc.version() == "13.0"
