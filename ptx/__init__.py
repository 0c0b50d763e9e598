"""Device text: one CUDA C++ file an operation, shared headers in `uf/`. Python only reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blake3 import blake3

FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r"^#include <(uf/[\w./]+)>$", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """An operation's source with all headers in place; `digest` covers every byte of it."""

    stem: str
    text: str
    digest: str


@cache
def source(stem: str, arch: str, declaration: str = "") -> Source:
    """The text of `{stem}.cu`, or of its variant for an architecture (`{stem}_sm90.cu`, ...).

    `declaration` (of `struct Args`) comes behind the number formats, in front of all the rest.

    Raises:
        FileNotFoundError: when there is no such kernel.
    """
    special = FOLDER / f"{stem}_{arch[:-1].replace('_', '')}.cu"
    path = special if special.exists() else FOLDER / f"{stem}.cu"
    seen: set[str] = set()
    head = _expand("#include <uf/types.cuh>\n", seen)
    text = head + declaration + _expand(path.read_text(encoding="utf-8"), seen)
    return Source(stem, text, blake3(text.encode()).hexdigest())


def stems() -> tuple[str, ...]:
    """All kernels, architecture variants left out."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.cu") if not re.search(r"_sm\d+$", p.stem)))


def _expand(text: str, seen: set[str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return _expand((FOLDER / name).read_text(encoding="utf-8"), seen)

    return _INCLUDE.sub(replaced, text)
