"""A C struct's layout by the rules of C, read from its declaration's text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZES = {"int": 4, "float": 4}
_MEMBER = re.compile(r"^\s*(const )?(\w+)(\*?) (\w+);$")


@dataclass(frozen=True)
class Member:
    """A member's type and where it stands. `pointed` is what it points to, "" for plain values."""

    kind: str
    offset: int
    size: int
    pointed: str
    const: bool


@dataclass(frozen=True)
class Layout:
    """Members by name in order, and the size of the whole."""

    members: dict[str, Member]
    size: int

    @classmethod
    def of(cls, text: str) -> Layout:
        """Of the `struct Args` in a text; the lines around it are not looked at."""
        body = text[text.index("struct Args {") :].splitlines()[1:]
        members: dict[str, Member] = {}
        end = widest = 0
        for line in body[: body.index("};")]:
            found = _MEMBER.match(line)
            assert found, f"no member of a struct: {line!r}"
            const, word, star, name = found.groups()
            assert name not in members, f"{name} is declared twice"
            size = 8 if star else _SIZES[word]
            offset = -(-end // size) * size
            members[name] = Member(f"{word}{star}", offset, size, word if star else "", bool(const))
            end, widest = offset + size, max(widest, size)
        return cls(members, -(-end // widest) * widest)


def defines(text: str) -> dict[str, str]:
    """The macros that a text defines."""
    return dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))
