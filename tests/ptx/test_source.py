"""How a kernel's text comes together: headers once, the arch's own variant, a digest of it all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ultraflash import ptx

# Both ends of a step, which may stand behind other GPUs.
LATE = ("host/copy_words",)

FILES = {
    "uf/types.cuh": "typedef int word;\n",
    "uf/low.cuh": "#include <uf/types.cuh>\nint low;\n",
    "uf/high.cuh": "#include <uf/low.cuh>\nint high;\n",
    "toy.cu": "// A toy.\n#include <uf/high.cuh>\n#include <uf/low.cuh>\nint toy;\n",
    "other.cu": "int other;\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A room of kernels of our own, under the rules of the real one."""
    (tmp_path / "uf").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(ptx, "FOLDER", tmp_path)
    ptx.source.cache_clear()
    yield tmp_path
    ptx.source.cache_clear()


def code(source: ptx.Source) -> list[str]:
    """Its lines without line marks, comments and blank ones."""
    return [line for line in source.text.splitlines() if line and line[0] not in "#/"]


def digest(stem: str = "toy", arch: str = "sm_90a", declaration: str = "") -> str:
    ptx.source.cache_clear()
    return ptx.source(stem, arch, declaration).digest


def test_includes_are_followed_once_and_the_declaration_stands_behind_the_formats(
    folder: Path,
) -> None:
    source = ptx.source("toy", "sm_90a", "struct Args {};\n")
    assert code(source) == [
        "typedef int word;",
        "struct Args {};",
        "int low;",
        "int high;",
        "int toy;",
    ]
    assert "#include" not in source.text


def test_line_marks_name_the_file_and_line_that_follow(folder: Path) -> None:
    """What a compiler would print for each line of code is where it really stands."""
    seen, name, number = [], "", 0
    for line in ptx.source("toy", "sm_90a", "struct Args {};").text.splitlines():
        if line.startswith("#line"):
            _, at, quoted = line.split()
            name, number = quoted.strip('"'), int(at) - 1
        else:
            number += 1
            if name != "Args" and line:
                assert (folder / name).read_text().splitlines()[number - 1] == line
                seen.append(name)
    assert set(seen) == {"toy.cu", "uf/types.cuh", "uf/low.cuh", "uf/high.cuh"}


@pytest.mark.parametrize("name", ["toy.cu", "uf/types.cuh", "uf/low.cuh", "uf/high.cuh"])
def test_the_digest_covers_every_file_that_goes_in(folder: Path, name: str) -> None:
    before, beside = digest(), digest("other")
    with (folder / name).open("a") as file:
        file.write("// one more word\n")
    assert digest() != before
    assert (digest("other") != beside) == (name == "uf/types.cuh")


def test_the_digest_covers_the_declaration(folder: Path) -> None:
    assert digest(declaration="struct Args { int n; };") != digest()


@pytest.mark.parametrize(
    ("endings", "chosen"),
    [
        ((), {"sm_90a": "", "sm_100a": "", "sm_103a": ""}),
        (("_sm90",), {"sm_90a": "_sm90", "sm_100a": "", "sm_103a": ""}),
        (("_sm100",), {"sm_90a": "", "sm_100a": "_sm100", "sm_103a": "_sm100"}),
        (
            ("_sm90", "_sm100", "_sm103"),
            {"sm_90a": "_sm90", "sm_100a": "_sm100", "sm_103a": "_sm103"},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_architecture_takes_its_own_variant(
    folder: Path, endings: tuple[str, ...], chosen: dict[str, str]
) -> None:
    for ending in endings:
        (folder / f"toy{ending}.cu").write_text(f"int toy{ending};\n")
    for arch, ending in chosen.items():
        assert code(ptx.source("toy", arch))[-1] == f"int toy{ending};"
    assert ptx.stems() == ("other", "toy"), "variants are no kernels of their own"


def test_every_kernel_says_first_what_it_is_and_names_its_reference() -> None:
    for stem in ptx.stems():
        text = (ptx.FOLDER / f"{stem}.cu").read_text()
        head = text[: text.index("#include")]
        assert head.startswith("// "), stem
        assert f"graphs/ops/{stem}.py" in head, stem
        assert re.search(rf" uf_{stem}\(const (__grid_constant__ )?Args a\)", text), stem


@pytest.mark.parametrize("stem", [*ptx.stems(), "host/copy_words"])
def test_a_kernel_that_starts_early_waits_whatever_it_is_given(stem: str) -> None:
    """The next kernel counts on it: one that ends without having waited breaks the chain."""
    text = (ptx.FOLDER / f"{stem}.cu").read_text()
    if "#include <uf/early.cuh>" not in text:
        assert "uf_starts_early" not in ptx.source(stem, "sm_90a").text, f"{stem} starts early"
        assert stem in LATE, f"{stem} does not start early"
        return
    assert stem not in LATE
    before, call, _ = text.partition("\n    Turn turn;\n")
    assert call, f"{stem} does not wait, or under a condition"
    function = before.rpartition("\n}\n")[2]
    assert "return;" not in function[function.rindex("Args") :], stem
