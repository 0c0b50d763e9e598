"""The precompile step: what it compiles, what it prints, and a capture on a fake driver."""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from helpers.rig import TINY
from ultraflash import ptx
from ultraflash.runtime import Engine, RuntimeConfig
from ultraflash.runtime.errors import CompileError
from ultraflash.runtime.gpu import nvrtc
from ultraflash.tools import capture_graphs

needs_compiler = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
SMALL = ("--block", "0", "--rows", "1")  # without drafting: what compiles slowest is left out


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = capture_graphs.main(arguments)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert capture_graphs.main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("capture_graphs: ")
    assert err.count("\n") == 1
    return err


def cells(text: str, kernel: str) -> list[str]:
    """The figures in a kernel's line: registers, shared, stack, spills, seconds."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [kernel]]
    return line.split()[-5:]


@needs_compiler
def test_kernels_are_compiled_then_found(capsys: pytest.CaptureFixture[str], kernels: Path) -> None:
    arguments = ("--compile-only", *SMALL, "--arch", "sm_90a,sm_103a", "--threads", "2")
    first = shown(capsys, *arguments)
    registers, shared, stack, spills, seconds = cells(first, "rms_norm")
    assert all(0 < int(r) <= 255 for r in registers.split("/"))
    assert (int(shared) > 0, stack, spills) == (True, "0", "0")
    assert seconds == "cached" or float(seconds) > 0
    found = re.search(r"(\d+) kernels for sm_90a, sm_103a: (\d+) compiled, (\d+) from", first)
    assert found
    total, fresh, cached = map(int, found.groups())
    assert fresh + cached == total
    again = shown(capsys, *arguments)
    assert f"{total} kernels for sm_90a, sm_103a: 0 compiled, {total} from " in again
    words = " ".join(again.split())  # the line is longer than the terminal
    assert re.search(r"in [\d.]+ s with 2 threads; all again from there in \d\.\d\d s", words)
    assert cells(again, "rms_norm")[:4] == [registers, shared, stack, spills]
    assert cells(again, "rms_norm")[4] == "cached"
    assert cells(again, "state/move_rows")[4] == "cached"
    assert (kernels / "cubin").is_dir()


@needs_compiler
def test_a_kernel_stands_once_for_each_of_its_variants(
    capsys: pytest.CaptureFixture[str], kernels: Path
) -> None:
    text = shown(capsys, "--compile-only", *SMALL, "--arch", "sm_90a")
    stems = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert stems.count("linear") > 3  # types, and sizes that follow from shapes
    assert stems.count("rope") == 1
    for word in ("fp8[2]", "f32[2]", "absent", "n_tiles 2"):
        assert word in text


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_one_that_does_not_compile_is_told_and_the_others_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_unit = nvrtc.compile_unit

    def failing(unit: nvrtc.Unit, arch: str, cache: Path) -> nvrtc.Kernel:
        if unit.stem == "rope":
            raise CompileError("rope", arch, "rope.cu(3): error")
        return compile_unit(unit, arch, cache)

    monkeypatch.setattr(nvrtc, "compile_unit", failing)
    assert capture_graphs.main(["--compile-only", *SMALL, "--arch", "sm_90a"]) == 1
    err = capsys.readouterr().err
    assert err == "capture_graphs: rope does not compile for sm_90a:\nrope.cu(3): error\n"


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_graphs_are_captured_and_launched(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda
) -> None:
    text = shown(
        capsys, "--checkpoint", str(TINY), "--block", "0", "--rows", "1..2", "--sequences", "1..2"
    )
    graphs = text[text.index("graphs on NVIDIA H200") :]
    rows = [line.split() for line in graphs.splitlines() if re.match(r" *(decode|prefill)", line)]
    assert [row[:3] for row in rows] == [
        ["decode", "1", "1"],
        ["decode", "2", "2"],
        ["prefill_part", "16", "1"],
        ["prefill", "16", "1"],
        ["prefill_part", "128", "1"],
        ["prefill", "128", "1"],
    ]
    assert all(int(row[3]) > 300 for row in rows), "nodes"
    assert cuda.graph_launches == len(rows) * (1 + capture_graphs._REPLAYS)
    assert "5 slots of" in graphs
    assert "largest: prefill_part, 128 rows, scratch " in graphs
    assert "  nodes " in graphs
    assert "GiB are taken" in " ".join(graphs.split())


@needs_compiler
@pytest.mark.usefixtures("cuda")
def test_a_server_finds_all_that_it_needs(
    capsys: pytest.CaptureFixture[str], kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache that cannot be written: plans, io, weights and state."""
    read, asked = nvrtc._read, set()

    def recorded(path: Path) -> bytes | None:
        asked.add(path)
        return read(path)

    monkeypatch.setattr(nvrtc, "_read", recorded)
    shown(capsys, "--compile-only", "--block", "0", "--rows", "1..2", "--arch", "sm_90a")
    filled = set(asked)

    def refuse(*_: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for module, name in ((nvrtc, "_compile"), (tempfile, "NamedTemporaryFile")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(Engine, "_warm_up", lambda engine: None)  # kernels do nothing here
    asked.clear()
    Engine.open(RuntimeConfig(TINY, "cuda", max_sequences=2, max_rows=2, draft_block=0,
                              max_seq=64, cache_dir=kernels))  # fmt: skip
    assert asked == filled


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], cuda: FakeCuda, kernels: Path) -> None:
    cuda.library = False
    text = refused(capsys, "--rows", "1")
    assert "there is no NVIDIA driver" in text
    assert "--compile-only needs no GPU" in text


@pytest.mark.usefixtures("kernels", "cuda")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--release",), ["--release and --world", "add --compile-only"]),
        (("--world", "2"), ["--release and --world", "add --compile-only"]),
        (("--arch", "sm_100a"), ["--arch sm_100a", "this GPU's sm_90a", "--compile-only"]),
        (("--world", "3", "--compile-only"), ["world 3 does not divide"]),
        (("--checkpoint", "/nowhere"), ["/nowhere"]),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    text = refused(capsys, *arguments)
    assert all(word in text for word in words), text


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        capture_graphs.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples", "--compile-only", "UF_CACHE_DIR", *ptx.ARCHITECTURES, "Spills"):
        assert word in text
