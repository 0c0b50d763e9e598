"""An operation's fields as its kernel's one parameter: `struct Args`, as C and as bytes.

Buffers become pointers (quantised weights two: codes and `{name}_scale`), extents `{name}_{axis}`,
constants plain members. An absent buffer is a null pointer of type `void` and `UF_HAS_{name}` is 0.
Collectives have a last member `exchange`, whose bytes are those of runtime/gpu/exchange.py.
What an operation is compiled for is `UF_{NAME}`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from ultraflash.graphs.plan import Op, Ref
from ultraflash.runtime.gpu.exchange import DECLARATION, Exchange

_POINTED = {
    "bf16": "bf16", "f32": "float", "i32": "int", "u32": "u32", "i64": "i64", "u64": "u64",
    "u8": "u8",
    "fp8": "fp8", "fp4": "fp4", "rows8": "fp8",
}  # fmt: skip
_SCALED = ("fp8", "fp4", "rows8")
Address = Callable[[Ref], tuple[int, ...]]


def struct_text(op: Op) -> str:
    """The C declaration of `Args` for this operation's buffer types, and its defines."""
    members = []
    defines = [f"#define UF_{name} {value}" for name, value in op.variant().items()]
    for name, kind, _ in _members(op, lambda ref: (0, 0)):
        members.append(f"    {kind} {name};")
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Ref) or value is None:
            defines.append(f"#define UF_HAS_{f.name} {int(value is not None)}")
        if isinstance(value, Ref):
            defines.append(f"#define UF_SCALED_{f.name} {int(value.dtype in _SCALED)}")
            extents = " * ".join(f"a.{f.name}_{axis}" for axis in range(len(value.shape)))
            defines.append(f"#define UF_SIZE_{f.name} ((i64){extents or 1})")
    if op.COLLECTIVE:
        defines.append(DECLARATION)
        members.append("    Exchange exchange;")
    return "\n".join([*defines, "struct Args {", *members, "};", ""])


def pack(op: Op, address: Address, exchange: Exchange | None = None, turn: int = 0) -> bytes:
    """The bytes of `Args`; `address` gives a buffer's device pointers (codes and scales).

    Collectives need their rank's `exchange`; `turn` pieces of messages went before theirs.
    """
    out = bytearray()
    for _, kind, value in _members(op, address):
        code = "Q" if kind.endswith("*") else {"int": "i", "float": "f"}[kind]
        size = struct.calcsize(code)
        out += bytes(-len(out) % size) + struct.pack(f"<{code}", value)
    out += bytes(-len(out) % 8)
    if op.COLLECTIVE:
        assert exchange is not None, "a plan of several ranks on a backend that is none of them"
        out += exchange.pack(turn)
    return bytes(out)


def _members(op: Op, address: Address) -> Iterator[tuple[str, str, Any]]:
    """(name, C type, value): pointers first, then extents and constants."""
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Ref):
            const = "" if f.name in op.OUT or f.name in op.UPDATES else "const "
            where = address(value)
            yield f.name, f"{const}{_POINTED[value.dtype]}*", where[0]
            if value.dtype in _SCALED:
                yield f"{f.name}_scale", "const u8*", where[1]
        elif value is None:
            yield f.name, "const void*", 0
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Ref):
            for axis, extent in enumerate(value.shape):
                yield f"{f.name}_{axis}", "int", extent
        elif isinstance(value, float):
            yield f.name, "float", value
        elif isinstance(value, int):
            yield f.name, "int", int(value)
