"""Single parts of the model, called as the plans call them: the half of a probe that needs no
sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ultraflash.graphs import rotary
from ultraflash.graphs.engram import engram_hashes
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import F32, U8, q8, q8_decode, qmx4, qmx4_decode, qnv4, qnv4_decode
from ultraflash.graphs.ops.engram_hash import hash_rows, live_grams
from ultraflash.graphs.ops.engram_ids import DEAD
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.hc_collapse import HcCollapse
from ultraflash.graphs.ops.hc_expand import HcExpand
from ultraflash.graphs.ops.hc_mix import HcMix, split_mixes
from ultraflash.graphs.ops.linear import Linear
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.ops.rope_table import RopeTable
from ultraflash.graphs.release import release_model
from ultraflash.graphs.rows import I32, I64
from ultraflash.runtime.backend import Array, Backend
from ultraflash.runtime.weights.load import Weights

_QUANTISERS = {"q8": (q8, q8_decode), "qmx4": (qmx4, qmx4_decode), "qnv4": (qnv4, qnv4_decode)}


class ProbeParts:
    """Quantisers, tables, hashes, gate and mixes. `full` means the release's constants, `tiny` this
    checkpoint's.
    """

    @staticmethod
    def weights_of(model: Model) -> list[str]:
        """The weights that the parts read, on the host whatever the backend."""
        mixes = [
            f"layers.{n}.hc_attn_{part}"
            for n in range(model.num_layers)
            for part in ("fn", "scale", "base")
        ]
        return [*mixes, *(["engram.token_map"] if model.engram_layers else [])]

    def __init__(
        self, model: Model, backend: Backend, weights: Weights, tokenizer: Tokenizer
    ) -> None:
        """Keep what the parts read."""
        self.model, self.backend, self._tokenizer = model, backend, tokenizer
        self._weights = weights

    def quant(self, kind: str, x: F32) -> tuple[U8, U8, F32]:
        """Codes (packed if FP4), scale bytes and values of kind `q8`, `qmx4` or `qnv4`."""
        quantise, decode = _QUANTISERS[kind]
        codes, scales = quantise(x)
        with np.errstate(
            over="ignore"
        ):  # groups near the largest bf16 overflow when decoded, by definition
            return codes, scales, decode(codes, scales)

    def rope_table(self, table: str, positions: Array) -> tuple[F32, F32, F32]:
        """Frequencies [pairs], cosines and sines [rows, pairs] of `plain` or `compressed`;
        `tiny_*`: this model's.
        """
        model = self.model if table.startswith("tiny_") else release_model()
        freq = rotary.frequencies(model)[table.removeprefix("tiny_")]
        return freq, *RopeTable.reference(positions.astype(np.int32), freq, 0)

    def rope(self, table: str, positions: Array, x: F32, inverse: bool) -> F32:
        """x [rows, dims] turned in its last dims."""
        _, cos, sin = self.rope_table(table, positions)
        return rotate(x, cos, -sin if inverse else sin)

    def hash_rows(self, which: str, ids: Array, live: Array) -> I64:
        """Table rows [rows, layers, columns]. `full`: ids are compressed ids; `tiny`: raw ids."""
        model = self._engram_model(which)
        compressed = np.asarray(ids, np.int64) if which == "full" else self.token_map()[ids]
        compressed = np.where(np.asarray(live) > 0, compressed, DEAD)
        back = np.arange(model.engram_max_order)
        position = np.arange(len(ids))[:, None]
        grams = live_grams(
            compressed[np.maximum(position - back, 0)], back > position, self._pad(which)
        )
        layers = engram_hashes(model).values()
        return np.stack(
            [hash_rows(grams, h.multipliers, h.primes, h.offsets) for h in layers], axis=1
        )

    def engram_constants(self, which: str) -> dict[str, Any]:
        """`primes` [layers, orders, heads], `offsets`, `multipliers`, `pad_compressed_id`."""
        model = self._engram_model(which)
        hashes = list(engram_hashes(model).values())
        shape = (len(hashes), model.engram_orders, model.engram_heads)
        return {
            "primes": np.stack([h.primes for h in hashes]).reshape(shape),
            "offsets": np.stack([h.offsets for h in hashes]),
            "multipliers": np.stack([h.multipliers for h in hashes]),
            "pad_compressed_id": self._pad(which),
        }

    def token_map(self) -> I64:
        """Compressed id of every token id."""
        found: I64 = self._weights.host("engram.token_map")
        return found

    def sinkhorn(self, mixes: F32, scale: F32, base: F32, iters: int) -> tuple[F32, F32, F32]:
        """`pre`, `post` [T, C] and `comb` [T, C, C] of projections [T, C*(C+2)]."""
        return split_mixes(mixes, scale, base, self.model.hc, iters, self.model.hc_eps)

    def layer_mix(self, layer: int, stream: F32, y: F32) -> dict[str, Array]:
        """A layer's attention mix: `pre`, `post`, `comb`; `collapse` by that pre; `expand` of y."""
        m, host = self.model, self._weights.host
        fn, scale, base = (host(f"layers.{layer}.hc_attn_{n}") for n in ("fn", "scale", "base"))
        pre, post, comb = HcMix.reference(
            stream, fn, scale, base, m.sinkhorn_iters, m.hc_eps, m.norm_eps
        )
        collapsed, expanded = (
            HcCollapse.reference(stream, pre),
            HcExpand.reference(y, stream, post, comb),
        )
        return {"pre": pre, "post": post, "comb": comb, "collapse": collapsed, "expand": expanded}

    def gate(
        self, x: F32, weight: F32, bias: F32, bias_vl: F32, is_image: Array, k: int, scale: float
    ) -> tuple[I32, F32]:
        """Expert ids (ascending) and weights, [T, k]."""
        logits = Linear.reference(x, weight.astype(np.float64), groups=1, rounded=False)
        slot = np.zeros(len(x), np.int32)
        return Gate.reference(logits, bias, bias_vl, is_image.astype(np.int32), slot, k, scale)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a string, control tokens included, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _engram_model(self, which: str) -> Model:
        return release_model() if which == "full" else self.model

    def _pad(self, which: str) -> int:
        # The release maps its pad token to itself (model.md 4.3: cid[2] = 2); its tokenizer is not
        # needed for that.
        return (
            release_model().engram_pad
            if which == "full"
            else int(self.token_map()[self.model.engram_pad])
        )
