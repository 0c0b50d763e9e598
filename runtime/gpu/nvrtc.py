"""NVRTC: source text to cubin, in a thread pool, through a content-addressed cache on disk.

Key: BLAKE3 of source text (headers in place), `Args` declaration, options, architecture and NVRTC
version. A cubin is written to a temporary file, synced and renamed; its own hash stands in front of
it and is checked when it is read, so that half a file is never a kernel:
it is compiled again.
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
from ultraflash.graphs.plan import Node, Op
from ultraflash.runtime.errors import CompileError, ConfigError
from ultraflash.runtime.gpu.args import struct_text

# Products and sums are fused only where the source says so: the references do not fuse them.
_OPTIONS = ("--std=c++17", "--fmad=false", "-default-device", "--ptxas-options=-v", "-lineinfo")
_HASH_BYTES = 32
_BESIDE = "#define UF_BESIDE 1\n"


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. `log` is what ptxas said: registers, stack, spills."""

    stem: str
    arch: str
    cubin: bytes
    log: str
    cached: bool

    @property
    def silent(self) -> bool:
        """Whether the log has no figures: some builds of NVRTC leave it empty."""
        return "Used" not in self.log

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

    @property
    def stack_bytes(self) -> int:
        """Local memory of a thread: arrays that are indexed at run time, and spills."""
        return _figure(r"(\d+) bytes stack frame", self.log)


@dataclass(frozen=True)
class Unit:
    """What is compiled: a kernel's stem and the declaration of its `Args`."""

    stem: str
    declaration: str

    @classmethod
    def of(cls, op: Op) -> Unit:
        """The kernel of an operation: types and variant are compiled in, the rest is arguments."""
        return cls(op.stem(), struct_text(op))

    @classmethod
    def of_node(cls, node: Node) -> Unit:
        """The same; a kernel that may run beside another waits elsewhere (ptx/uf/early.cuh)."""
        return cls(node.op.stem(), _BESIDE * node.beside + struct_text(node.op))

    @property
    def beside(self) -> bool:
        """Whether it may run beside another."""
        return self.declaration.startswith(_BESIDE)

    @property
    def entry(self) -> str:
        """The kernel's name in its cubin."""
        return f"uf_{self.stem.rpartition('/')[2]}"


def version() -> str:
    """The compiler's version, part of every key.

    Raises:
        ConfigError: when there is no compiler.
    """
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings find no libnvrtc
        raise ConfigError(
            "kernels are compiled by NVRTC, and libnvrtc.so was not found: "
            "pip install 'nvidia-cuda-nvrtc==13.0.*'"
        ) from error
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
        ConfigError: when there is no compiler, or the cache cannot be written.
    """
    text = ptx.source(unit.stem, arch, unit.declaration).text
    key = blake3("\0".join([text, *_OPTIONS, arch, version()]).encode()).hexdigest()
    path = cache_dir / "cubin" / key[:2] / key
    kept = _read(path)
    if kept is not None:
        log, _, cubin = kept.partition(b"\0")
        return Kernel(unit.stem, arch, cubin, log.decode(), cached=True)
    kernel = _compile(unit.stem, arch, text)
    _write(path, kernel.log.encode() + b"\0" + kernel.cubin)
    return kernel


def _compile(stem: str, arch: str, text: str) -> Kernel:
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{stem}.cu".encode(), 0, None, None)
    _check(error, stem, arch, "")
    try:
        options = [o.encode() for o in (f"--gpu-architecture={arch}", *_OPTIONS)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _log(program)
        _check(error, stem, arch, log)
        error, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(error, stem, arch, log)
        cubin = bytearray(size)
        (error,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        _check(error, stem, arch, log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Kernel(stem, arch, bytes(cubin), log, cached=False)


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
    except OSError:  # not there, or not readable: writing will say what is wrong with the folder
        return None
    digest, body = raw[:_HASH_BYTES], raw[_HASH_BYTES:]
    return body if blake3(body).digest() == digest else None


def _write(path: Path, body: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, blake3(body).digest() + body)
    except OSError as error:
        raise ConfigError(
            f"a compiled kernel cannot be kept in {path.parent} ({error.strerror}): make room "
            f"there, or set UF_CACHE_DIR to another directory"
        ) from error


def _replace(path: Path, raw: bytes) -> None:
    """Whole or not at all, also when others write the same file or the machine goes down."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _figure(pattern: str, log: str) -> int:
    return max((int(n) for n in re.findall(pattern, log)), default=0)
