"""NVRTC: source text to cubin, in a thread pool, through a content-addressed cache on disk.

Key: BLAKE3 of source text (headers in place), `Args` declaration, options, architecture and NVRTC
version. A cubin is written to a temporary file, synced and renamed; its own hash stands in front of
it and is checked when it is read, so that half a file is an error and never a kernel.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from cuda.bindings import nvrtc

from ultraflash import ptx
from ultraflash.runtime.errors import CompileError

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
# Products and sums are fused only where the source says so: the references do not fuse them.
_OPTIONS = ("--std=c++17", "--fmad=false", "-default-device", "--ptxas-options=-v", "-lineinfo")
_HASH_BYTES = 32


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. `log` is what ptxas said: registers, stack, spills."""

    stem: str
    arch: str
    cubin: bytes
    log: str
    cached: bool

    @property
    def registers(self) -> int:
        """Registers a thread."""
        return _figure(r"Used (\d+) registers", self.log)

    @property
    def spill_bytes(self) -> int:
        """Bytes that registers overflow into local memory, stores and loads."""
        return _figure(r"(\d+) bytes spill stores", self.log) + _figure(
            r"(\d+) bytes spill loads", self.log
        )

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a CTA."""
        return _figure(r"(\d+) bytes smem", self.log)


@dataclass(frozen=True)
class Unit:
    """What is compiled: a kernel's stem and the declaration of its `Args`."""

    stem: str
    declaration: str


def version() -> str:
    """The compiler's version, part of every key."""
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def compile_units(
    units: Iterable[Unit], arch: str, cache_dir: Path, threads: int | None = None
) -> dict[Unit, Kernel]:
    """Compile everything, side by side.

    Raises:
        CompileError: for the first kernel that does not compile, with the compiler's log.
    """
    wanted = list(dict.fromkeys(units))
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        kernels = list(pool.map(lambda unit: compile_unit(unit, arch, cache_dir), wanted))
    return dict(zip(wanted, kernels, strict=True))


def compile_unit(unit: Unit, arch: str, cache_dir: Path) -> Kernel:
    """One kernel, from the cache if it is there and whole.

    Raises:
        CompileError: when it does not compile.
    """
    text = ptx.source(unit.stem, arch, unit.declaration).text
    key = blake3("\0".join([text, *_OPTIONS, arch, version()]).encode()).hexdigest()
    path = cache_dir / "cubin" / key[:2] / key
    kept = _read(path)
    if kept is not None:
        log, _, cubin = kept.partition(b"\0")
        return Kernel(unit.stem, arch, cubin, log.decode(), cached=True)
    cubin, log = _compile(unit.stem, arch, text)
    _write(path, log.encode() + b"\0" + cubin)
    return Kernel(unit.stem, arch, cubin, log, cached=False)


def _compile(stem: str, arch: str, text: str) -> tuple[bytes, str]:
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{stem}.cu".encode(), 0, None, None)
    _check(error, stem, arch, "")
    options = [o.encode() for o in (f"--gpu-architecture={arch}", *_OPTIONS)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _log(program)
    _check(error, stem, arch, log)
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(error, stem, arch, log)
    cubin = bytearray(size)
    (error,) = nvrtc.nvrtcGetCUBIN(program, cubin)
    _check(error, stem, arch, log)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), log


def _log(program: nvrtc.nvrtcProgram) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.rstrip(b"\0").decode(errors="replace")


def _check(error: nvrtc.nvrtcResult, stem: str, arch: str, log: str) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(stem, arch, log or error.name)


def _read(path: Path) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, body = raw[:_HASH_BYTES], raw[_HASH_BYTES:]
    return body if blake3(body).digest() == digest else None


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(blake3(body).digest() + body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def _figure(pattern: str, log: str) -> int:
    return max((int(n) for n in re.findall(pattern, log)), default=0)
