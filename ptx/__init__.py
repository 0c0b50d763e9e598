"""Device text: one CUDA C++ file an operation, shared headers in `uf/`. Python only reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3

FOLDER = Path(__file__).parent
# Endings of a kernel's variants, the most special first: sm_103a runs what was written for sm_100a.
_VARIANTS = {"sm_90a": ("_sm90",), "sm_100a": ("_sm100",), "sm_103a": ("_sm103", "_sm100")}
ARCHITECTURES = tuple(_VARIANTS)
_INCLUDE = re.compile(r"#include <(uf/[\w./]+)>")


@dataclass(frozen=True)
class Source:
    """An operation's source with all headers in place; `digest` covers every byte of it."""

    stem: str
    text: str
    digest: str


@cache
def source(stem: str, arch: str, declaration: str = "") -> Source:
    """The text of `{stem}.cu`, or of its variant for an architecture (`{stem}_sm90.cu`, ...).

    `declaration` (of `struct Args`) comes behind the number formats, in front of all the rest. Line
    marks name the files, so that a compiler's messages and a profiler's lines point into them.

    Raises:
        FileNotFoundError: when there is no such kernel.
    """
    names = [f"{stem}{ending}.cu" for ending in (*_VARIANTS[arch], "")]
    name = next((n for n in names if (FOLDER / n).exists()), names[-1])
    seen: set[str] = set()
    parts = [*_expanded("uf/types.cuh", seen), '#line 1 "Args"', declaration]
    text = "\n".join([*parts, *_expanded(name, seen)]) + "\n"
    return Source(stem, text, blake3(text.encode()).hexdigest())


def stems() -> tuple[str, ...]:
    """All kernels, architecture variants left out."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.cu") if not re.search(r"_sm\d+$", p.stem)))


def _expanded(name: str, seen: set[str]) -> list[str]:
    """A file's lines, each header of ours in the place of the first `#include` that names it."""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((FOLDER / name).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.fullmatch(line)
        if include is None:
            lines.append(line)
        elif include[1] in seen:
            lines.append("")
        else:
            lines += [*_expanded(include[1], seen), f'#line {number + 1} "{name}"']
    return lines
