"""A C struct's layout by the rules of C, read from its declaration's text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_SIZES = {"int": 4, "float": 4}
_MEMBER = re.compile(r"^\s*(const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?;$")


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
    """Members by name in order, and the size and alignment of the whole.

    A member that is a struct or an array stands as what it holds: `inner.x`, `list[0]`.
    """

    members: dict[str, Member]
    size: int
    widest: int

    @classmethod
    def of(cls, text: str, name: str = "Args") -> Layout:
        """Of `struct {name}` in a text, where the structs that it holds are declared too."""
        body = text[text.index(f"struct {name} {{") :].splitlines()[1:]
        members: dict[str, Member] = {}
        end, widest = 0, 1
        for line in body[: body.index("};")]:
            found = _MEMBER.match(line)
            assert found, f"no member of a struct: {line!r}"
            const, word, star, name, count = found.groups()
            assert name not in members, f"{name} is declared twice"
            if star or word in _SIZES:
                size = align = 8 if star else _SIZES[word]
                plain = Member(f"{word}{star}", 0, size, word if star else "", bool(const))
                inner = {"": plain}
            else:
                held = cls.of(text, word)
                size, align = held.size, held.widest
                inner = {f".{key}": member for key, member in held.members.items()}
            offset = -(-end // align) * align
            for number in range(int(count or 1)):
                at = f"{name}[{number}]" if count else name
                for key, member in inner.items():
                    where = offset + number * size + member.offset
                    members[at + key] = replace(member, offset=where)
            end, widest = offset + int(count or 1) * size, max(widest, align)
        return cls(members, -(-end // widest) * widest, widest)


def defines(text: str) -> dict[str, str]:
    """The macros that a text defines."""
    return dict(re.findall(r"^#define (\w+) (.*)$", text, re.MULTILINE))
