"""What a call left in a plan's buffers, under the names of the golden vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import F32, q8_decode, qmx4_decode, qnv4_decode
from ultraflash.runtime.backend import Array, Runner

_LAYER = {
    "attn_in": "attn_in",
    "attn_out": "attn_out",
    "ffn_in": "ffn_in",
    "ffn_out": "ffn_out",
    "X": "X",
    "pre": "ffn.pre",
    "expert_ids": "ffn.expert_ids",
    "expert_w": "ffn.expert_w",
}
_ENGRAM = {"engram_X": "engram.x", "engram_kv": "engram.kv", "hash": "engram.rows"}
_STAGE = {
    "X": "X",
    "pre": "ffn.pre",
    "attn_out": "attn_out",
    "expert_ids": "ffn.expert_ids",
    "expert_w": "ffn.expert_w",
}


@dataclass(frozen=True)
class ProbeValues:
    """The buffers of one runner, as one of `world` ranks holds them; quantised ones decoded."""

    model: Model
    runner: Runner
    world: int

    def logits(self) -> F32:
        """Of all rows, [T, V]."""
        return self._whole("head.logits")

    def choices(self, rows: int) -> dict[str, Array]:
        """`L{L}.expert_ids` [P, k], `L{L}.sel` [P, K], `pool` [P, n] of a fresh sequence."""
        model, read = self.model, self.runner.read
        found = {f"L{n}.expert_ids": read(f"L{n}.ffn.expert_ids") for n in range(model.num_layers)}
        found |= {f"L{n}.sel": read(f"L{n}.attn.sel") for n in model.index_sources}
        return found | {"pool": self._pool_mask(rows // model.ratio(model.candidate_source))}

    def layer(self, layer: int, start: int, end: int, own: Array | None) -> dict[str, Array]:
        """One layer's values for rows [start, end); `own` is a selection that was read before."""
        model, label = self.model, f"L{layer}"
        names = _LAYER | (_ENGRAM if layer in model.engram_layers else {})
        if layer in model.index_sources and own is None:
            names |= {"sel": "attn.sel"}
        found = {key: self.runner.read(f"{label}.{name}") for key, name in names.items()}
        if own is not None:
            found["sel"] = own
        if layer in model.kv_sources:
            ends_entry = (np.arange(start, end) + 1) % model.ratio(layer) == 0
            found["latent"] = self.runner.read(f"{label}.attn.latent")[ends_entry]
        if layer in model.index_sources:
            found["index_scores"] = self._scores(layer, end // model.ratio(layer))
        return found

    def caches(self, slot: int, length: int) -> dict[str, Array]:
        """What `length` rows left in a slot; keys as in the vectors."""
        found: dict[str, Array] = {}
        for layer in range(self.model.num_layers):
            found[f"L{layer}.window_ring"] = self._window(slot, f"L{layer}.attn", length)
        for layer in self.model.kv_sources:
            ratio, label = self.model.ratio(layer), f"L{layer}.attn"
            codes, scales, key_codes, key_scales = (
                self.runner.read(f"{label}.{name}")[slot, : length // ratio]
                for name in ("main_codes", "main_scales", "key_codes", "key_scales")
            )
            found[f"L{layer}.main_kv"] = qnv4_decode(codes, scales)
            found[f"L{layer}.index_k"] = qmx4_decode(key_codes, key_scales)
            if ratio == 2 and length % 2:
                for name in ("kv", "gate"):
                    pending = self.runner.read(f"{label}.pending_{name}")[slot]
                    found[f"L{layer}.pending_{name}"] = pending[[(length - 1) % len(pending)]]
        return found

    def draft(self, slot: int, length: int, block: int, anchor: int) -> dict[str, Any]:
        """What a block of drafts behind `anchor` left; keys as `Probe.draft` has them."""
        read = self.runner.read
        before = self._whole("draft.logits")
        markov = [self._whole(f"draft.{i}.markov")[0] for i in range(block)]
        found = {
            "main_x": read("context.main_x"),
            "h": read("draft.h"),
            "logits_before_markov": before,
            "logits": before + np.stack(markov),
            "confidence": read("io.confidence")[0],
            "tokens": [anchor, *read("io.drafts")[0].tolist()],
        }
        for stage in range(self.model.draft_stages):
            label = f"draft.stage{stage}"
            for key, name in _STAGE.items():
                found[f"stage{stage}.{key}"] = read(f"{label}.{name}")
            found[f"stage{stage}.ring"] = self._window(slot, label, length)
        return found

    def _whole(self, name: str) -> F32:
        """A buffer whose columns are split over ranks, put together."""
        return self.runner.read(name if self.world == 1 else f"{name}_all")

    def _scores(self, layer: int, entries: int) -> F32:
        scores = self._whole(f"L{layer}.attn.index_scores")
        source, size = self.model.candidate_source, self.model.candidate_block_size
        if layer <= source:
            return scores[:, :entries]
        # Scores stand in the pool's order: back to where their entries are.
        pool = self.runner.read(f"L{source}.attn.pool")[:, : scores.shape[1] // size]
        whole = np.full((len(scores), -(-entries // size), size), -np.inf, np.float32)
        row, block = np.nonzero(pool >= 0)
        whole[row, pool[row, block]] = scores.reshape(len(scores), -1, size)[row, block]
        return whole.reshape(len(scores), -1)[:, :entries]

    def _pool_mask(self, entries: int) -> Array:
        source, size = self.model.candidate_source, self.model.candidate_block_size
        blocks = np.arange(entries) // size
        inside = (self.runner.read(f"L{source}.attn.pool")[:, :, None] == blocks).any(axis=1)
        reach = (self.runner.read("io.position") + 1) // self.model.ratio(source)
        mask: Array = (inside & (np.arange(entries) < reach[:, None])).astype(np.uint8)
        return mask

    def _window(self, slot: int, label: str, length: int) -> F32:
        codes, scales = (self.runner.read(f"{label}.ring_{n}")[slot] for n in ("codes", "scales"))
        window = self.model.window
        position = np.arange(max(0, length - window), length)
        ring = np.empty((len(position), codes.shape[1]), np.float32)
        ring[position % window] = q8_decode(codes, scales)[position % len(codes)]
        return ring
