"""Random weights that behave like the released ones: norms, gains and scales of model.md section 8.

Two things are not random. Each sub-layer writes about .045 rms into a stream whose embedding has
.12, so that activations neither vanish nor grow. And the head has learnt which token follows which
in the sentences of the tiny tokenizer, so that a demonstration prints words.

Every tensor has a seed of its own, made of `seed` and its name: the same name, shape and seed give
the same bytes, whatever else is in the checkpoint.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.checkpoint import TensorSpec, expected_tensors
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import F32, F64, bf16_bits, bf16_from_bits, to_bf16
from ultraflash.runtime.weights.formats import BLOCK, encode_fp4, encode_fp8, encode_rows8

EMBEDDING_RMS = 0.12
_PREFIX = re.compile(r"^(?:layers|mtp)\.\d+\.|^vision\.blocks\.\d+\.")
_EXPERT = re.compile(r"experts\.\d+\.")

# Means of norm weights; their deviation is 15 % of it.
_NORM_MEANS = {
    "attn_norm": 0.025, "ffn_norm": 0.2, "attn.q_norm": 0.97, "attn.kv_norm": 0.8,
    "attn.compressor.norm": 0.6, "attn.indexer.k_norm": 0.5, "main_norm": 0.025,
    "norm": 1.0, "norm1": 1.0, "norm2": 1.0, "vision.norm": 1.0,
}  # fmt: skip

# Deviation of matrices in units of fan_in^-0.5. Attention and gate are sharper than in the release
# (wq_b .95, kv_norm .4, gate 2.9): with few keys and experts they would only average. Compressor
# and weights_proj undo the .025 of attn_norm. wo_b and w2 are measured, to write .045 rms.
_GAINS = {
    "attn.wq_a": 1.6, "attn.wq_b": 1.5, "attn.wkv": 1.8, "attn.wo_a": 1.6, "attn.wo_b": 0.1,
    "attn.compressor.wkv": 40.0, "attn.compressor.wgate": 60.0,
    "attn.indexer.wk": 1.0, "attn.indexer.wq_b": 1.4, "attn.indexer.weights_proj": 40.0,
    "hc_attn_fn": 1.0, "hc_ffn_fn": 1.0, "ffn.gate": 5.9,
    "ffn.experts.w1": 1.5, "ffn.experts.w3": 1.5, "ffn.experts.w2": 0.7,
    "ffn.shared_experts.w1": 1.5, "ffn.shared_experts.w3": 1.5, "ffn.shared_experts.w2": 0.64,
    "engram.wkv": 1.0, "main_proj": 1.5, "confidence_head.proj": 2.0,
    "vision.patch_embed.proj": 1.0, "attn.wqkv": 1.3, "attn.wo": 1.0, "mlp.w1": 1.2, "mlp.w2": 1.2,
    "aligner.w1": 1.0, "aligner.w2": 0.25,
}  # fmt: skip
# Engram values are multiplied by this: what a table row writes should not drown the embedding.
_ENGRAM_VALUE_GAIN = 0.08

# (mean, deviation) of everything else.
_PLAIN = {
    "embed": (0.0, EMBEDDING_RMS), "attn.attn_sink": (0.0, 1.0),
    "ffn.gate.bias": (0.0, 0.1), "ffn.gate.bias_vl": (0.0, 0.3),
    "hc_attn_base": (0.0, 0.6), "hc_ffn_base": (0.0, 0.6),
    "hc_attn_scale": (0.65, 0.1), "hc_ffn_scale": (0.65, 0.1),
    "engram.q_weight": (1.0, 0.3), "engram.k_weight": (1.0, 0.3),
    "markov_head.embed": (0.0, 1.0), "markov_head.head": (0.0, 0.54),
    "image_start": (0.0, 0.12), "image_end": (0.0, 0.12), "image_newline": (0.0, 0.12),
}  # fmt: skip
_BIAS = (0.0, 0.1)  # vision only


class TinyWeights:
    """The stored values of every tensor of a model, by official name."""

    def __init__(self, model: Model, seed: int, successors: Counter[tuple[int, int]]) -> None:
        """`successors` counts (token, next token): what the head shall favour."""
        self.specs = expected_tensors(model)
        self._model, self._seed, self._successors = model, seed, successors
        # A quantised matrix and its scales are asked for one after the other, or nearly so.
        self._pair = lru_cache(maxsize=8)(self._encoded)

    def __call__(self, name: str) -> npt.NDArray[Any]:
        """Codes, scale bytes, bf16 bits or float32 values, as the dtype of the tensor says."""
        spec = self.specs[name]
        if spec.dtype == "F32":
            return self._values(name, spec.shape)
        if spec.dtype == "BF16":
            return bf16_bits(to_bf16(self._bf16(name, spec)))
        matrix = name.removesuffix(".weight").removesuffix(".scale")
        codes, scales = self._pair(matrix)
        return scales if name.endswith(".scale") else codes

    def _bf16(self, name: str, spec: TensorSpec) -> F32:
        if name != "head.weight":
            return self._values(name, spec.shape)
        return readout(bf16_from_bits(self("embed.weight")), self._successors)

    def _encoded(self, matrix: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        spec = self.specs[matrix + ".weight"]
        rng = self._rng(matrix)
        if matrix.endswith("engram.embed"):
            values = rng.standard_normal(spec.shape) * _spread_rows(rng, spec.shape[0])
            return encode_rows8(values.astype(np.float32))
        rows, columns = spec.shape[0], spec.shape[1] * (2 if spec.dtype == "I8" else 1)
        values = rng.standard_normal((rows, columns)) * (_GAINS[_role(matrix)] * columns**-0.5)
        values *= _octaves(rng, rows, columns, 1 if spec.dtype == "I8" else BLOCK)
        if matrix.endswith("engram.wkv"):
            values[self._model.hc * self._model.hidden :] *= _ENGRAM_VALUE_GAIN
        encode = encode_fp4 if spec.dtype == "I8" else encode_fp8
        return encode(values.astype(np.float32))

    def _values(self, name: str, shape: tuple[int, ...]) -> F32:
        role = _role(name.removesuffix(".weight"))
        if role in _NORM_MEANS:
            mean = _NORM_MEANS[role]
            deviation = 0.15 * mean
        elif role in _GAINS:
            mean, deviation = 0.0, _GAINS[role] * float(shape[-1]) ** -0.5
        else:
            mean, deviation = (
                _BIAS if name.endswith(".bias") and role not in _PLAIN else _PLAIN[role]
            )
        values = mean + deviation * self._rng(name).standard_normal(shape)
        return values.astype(np.float32)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])


def readout(
    embed: F32, successors: Counter[tuple[int, int]], signal: float = 8.0, peak: float = 28.0
) -> F32:
    """A head [V, D] that gives the successors of a token the logits log(share) + `peak`.

    The normed last stream points to the embedding of its token with length `signal` and otherwise
    anywhere; a row that answers to many tokens collects more of that noise and is damped for it.
    """
    before = sorted({first for first, _ in successors})
    column = {token: i for i, token in enumerate(before)}
    wanted: F64 = np.zeros((len(embed), len(before)))
    for (first, then), times in successors.items():
        wanted[then, column[first]] = times
    seen = wanted > 0
    share = wanted / wanted.sum(axis=0)
    wanted[seen] = peak + np.log(share[seen])
    wanted *= np.maximum(seen.sum(axis=1, keepdims=True), 1) ** -0.15
    known = embed[before].astype(np.float64)
    known *= signal / np.sqrt((known**2).sum(axis=1, keepdims=True))
    gram = known @ known.T
    gram[np.diag_indices_from(gram)] *= 1.1
    head: F32 = (wanted @ np.linalg.solve(gram, known)).astype(np.float32)
    return head


def _role(name: str) -> str:
    return _EXPERT.sub("experts.", _PREFIX.sub("", name))


def _octaves(rng: np.random.Generator, rows: int, columns: int, block: int) -> F64:
    """Gains of 1/2, 1 or 2 by scale group, so that a scale read at the wrong place shows; rms 1."""
    groups = (-(-rows // block), -(-columns // BLOCK))
    gains = 2.0 ** rng.integers(-1, 2, groups) / np.sqrt((0.25 + 1 + 4) / 3)
    spread: F64 = gains.repeat(block, axis=0)[:rows].repeat(BLOCK, axis=1)[:, :columns]
    return spread


def _spread_rows(rng: np.random.Generator, rows: int) -> F64:
    gains: F64 = np.exp(0.5 * rng.standard_normal((rows, 1)))
    return gains
