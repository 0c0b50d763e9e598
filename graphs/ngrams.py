"""The Engram update as nodes (model.md section 4.3); its constants come from `graphs/engram.py`."""

from __future__ import annotations

from ultraflash.graphs.ops.engram_gather import EngramGather
from ultraflash.graphs.ops.engram_hash import EngramHash
from ultraflash.graphs.ops.engram_mix import EngramMix
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Scope


def engram(s: Scope, layer: int, x: Ref, compressed_ids: Ref, history: Ref) -> Ref:
    """The Engram update of the streams in front of layer `layer`'s mix (model.md 4.3)."""
    m, io, label = s.model, s.io, f"L{layer}.engram"
    p = f"layers.{layer}.engram"
    columns, table_rows = m.engram_columns, m.engram_rows[m.engram_layers.index(layer)]
    rows = s.out(f"{label}.rows", (columns,), "i64")
    token_map = s.b.weight("engram.token_map", (m.vocab,), "i64")
    s.b.add(
        f"{label}.hash",
        EngramHash(
            compressed_ids,
            history,
            io.slot,
            io.position,
            io.row_start,
            token_map,
            s.b.weight(f"{p}.multipliers", (m.engram_max_order,), "i64"),
            s.b.weight(f"{p}.primes", (columns,), "i64"),
            s.b.weight(f"{p}.offsets", (columns,), "i64"),
            rows,
            m.engram_pad,
        ),
    )
    gathered = s.out(f"{label}.rows8", (columns * m.engram_dim,))
    table = s.b.weight(f"{p}.embed", (table_rows, m.engram_dim), "rows8")
    s.b.add(f"{label}.gather", EngramGather(rows, table, gathered))
    kv = s.linear(
        f"{label}.kv",
        s.quant8(f"{label}.rows_q8", gathered),
        f"{p}.wkv",
        (m.hc + 1) * m.hidden,
        "fp8",
    )
    y = s.out(f"{label}.x", x.shape[1:])
    q_weight, k_weight = (s.b.weight(f"{p}.{n}_weight", (m.hc, m.hidden), "bf16") for n in "qk")
    s.b.add(f"{label}.mix", EngramMix(x, kv, q_weight, k_weight, io.is_image, y, m.norm_eps))
    return y
