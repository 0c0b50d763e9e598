"""Compressed entries, index keys and selections (model.md sections 4.5 and 4.6) as nodes.

One `GlobalStore` walks down the layers: KV source layers add entries, index source layers make
selections, the layers in between read the nearest ones. Every source scores against its own keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ultraflash.graphs.attention import GlobalKv
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.ops.candidate_pool import CandidatePool
from ultraflash.graphs.ops.compress_pairs import CompressPairs
from ultraflash.graphs.ops.index_query import IndexQuery
from ultraflash.graphs.ops.index_scores import IndexScores, pool_places
from ultraflash.graphs.ops.select_topk import SelectTopk
from ultraflash.graphs.ops.store_index_key import StoreIndexKey
from ultraflash.graphs.ops.store_main_kv import StoreMainKv
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.scope import Angles, Scope, ring, write_rings


@dataclass
class GlobalStore:
    """The latest entries, keys, selection and pool while a plan is being built from the first layer
    to the last.
    """

    s: Scope
    group_angles: dict[
        int, Angles
    ]  # ratio -> angles of a group's first token, for rows that complete it
    main: dict[int, tuple[Ref, Ref]] = field(default_factory=dict)  # KV source -> codes, scales
    keys: dict[int, tuple[Ref, Ref]] = field(default_factory=dict)
    sel: dict[int, Ref] = field(default_factory=dict)  # index source -> selection
    pool: Ref | None = None

    def seen_by(self, layer: int) -> GlobalKv:
        """What `layer` attends to beyond its window."""
        m = self.s.model
        return GlobalKv(*self.main[m.kv_source(layer)], self.sel[m.index_source(layer)])

    def know_entries(self, layer: int) -> None:
        """Name the entries and index keys of KV source `layer`, whoever fills them."""
        s, m, label = self.s, self.s.model, f"L{layer}.attn"
        slots, entries = s.capacity.slots, s.capacity.entries(m.ratio(layer))

        def state(name: str, width: int) -> Ref:
            return s.b.state(f"{label}.{name}", (slots, entries, width), "u8")

        self.main[layer] = (
            state("main_codes", m.head_dim // 2),
            state("main_scales", m.head_dim // 16),
        )
        self.keys[layer] = (
            state("key_codes", m.index_dim // 2),
            state("key_scales", m.index_dim // 32),
        )

    def add_entries(self, layer: int, x: Ref) -> None:
        """Compress this step's tokens into entries and index keys of KV source `layer`; x is its
        normed input.
        """
        s, m, io = self.s, self.s.model, self.s.io
        ratio, label = m.ratio(layer), f"L{layer}.attn"
        latent = self._latent(layer, x)
        at = self.group_angles[ratio]
        self.know_entries(layer)
        s.b.add(
            f"{label}.store_kv",
            StoreMainKv(latent, at.cos, at.sin, io.slot, io.position, *self.main[layer], ratio),
        )
        raw = s.linear(
            f"{label}.index_wk", latent, f"layers.{layer}.attn.indexer.wk", m.index_dim, "bf16"
        )
        key = s.norm(f"{label}.index_key", raw, f"layers.{layer}.attn.indexer.k_norm")
        s.b.add(
            f"{label}.store_key",
            StoreIndexKey(key, at.cos, at.sin, io.slot, io.position, *self.keys[layer], ratio),
        )

    def select(self, layer: int, x: Ref, low_q8: Ref, at: Angles) -> None:
        """Score entries with index source `layer`'s queries and choose; the candidate source also
        makes the pool.
        """
        s, m, io = self.s, self.s.model, self.s.io
        label, weights, source = (
            f"L{layer}.attn",
            f"layers.{layer}.attn.indexer",
            m.kv_source(layer),
        )
        ratio, heads = m.ratio(layer), s.split(m.index_heads)
        flat = s.linear(f"{label}.index_wq", low_q8, f"{weights}.wq_b", heads * m.index_dim, "fp8")
        weight = s.linear(
            f"{label}.index_w", x, f"{weights}.weights_proj", heads, "bf16", beside=True
        )
        q = s.out(f"{label}.index_q", (heads, m.index_dim))
        s.b.add(f"{label}.index_query", IndexQuery(flat, at.cos, at.sin, q, heads))
        pool = self.pool if layer > m.candidate_source else None
        size, places = m.candidate_block_size, s.capacity.entries(ratio)
        if pool:
            places = pool_places(m.candidate_blocks, size, places)
        part = s.out(f"{label}.index_scores", (places,), "f32")
        op = IndexScores(
            q, weight, *self.keys[source], io.slot, io.position, pool, part, ratio, size,
            m.index_scale,
        )  # fmt: skip
        s.b.add(f"{label}.index_score", op)
        scores = part
        if s.b.world > 1:
            scores = s.out(f"{label}.index_scores_all", (places,), "f32")
            s.b.add(f"{label}.index_reduce", AllReduce(part, scores, rounded=False))
        sel = s.out(f"{label}.sel", (m.index_topk,), "i32")
        s.b.add(
            f"{label}.select", SelectTopk(scores, io.position, pool, sel, ratio, size, m.index_topk)
        )
        self.sel[layer] = sel
        if layer == m.candidate_source:
            self.pool = s.out(f"{label}.pool", (m.candidate_blocks,), "i32")
            s.b.add(
                f"{label}.pool",
                CandidatePool(scores, io.position, self.pool, ratio, size, m.candidate_blocks),
            )

    def _latent(self, layer: int, x: Ref) -> Ref:
        s, m, io = self.s, self.s.model, self.s.io
        label, weights = f"L{layer}.attn", f"layers.{layer}.attn.compressor"
        if m.ratio(layer) == 1:
            raw = s.linear(f"{label}.comp_kv", x, f"{weights}.wkv", m.head_dim, "bf16")
        else:
            kv, gate = (
                s.linear(
                    f"{label}.comp_{n}",
                    x,
                    f"{weights}.w{n}",
                    m.head_dim,
                    "bf16",
                    "f32",
                    beside=n == "gate",
                )
                for n in ("kv", "gate")
            )
            kv_ring, gate_ring = (
                ring(s, f"{label}.pending_{n}", (m.head_dim,), "f32") for n in ("kv", "gate")
            )
            raw = s.out(f"{label}.comp", (m.head_dim,))
            s.b.add(
                f"{label}.compress",
                CompressPairs(
                    kv, gate, kv_ring, gate_ring, io.slot, io.position, io.row_start, raw
                ),
            )
            write_rings(s, f"{label}.write", (kv, gate), (kv_ring, gate_ring))
        return s.norm(f"{label}.latent", raw, f"{weights}.norm")
