"""Random weights and state with the statistics of the released ones (model.md section 8), for speed
at full size without a checkpoint. Text that comes out of them means nothing.

What a buffer holds follows from its name, shape and format alone: Philox keyed by the name, the
seed and the rank. The device fills itself (runtime/gpu/fill.py); `Codes.bytes` and `Normal.values`
are the same in NumPy.

Three things differ from the released statistics, on purpose:

* Every sub-layer writes little into the streams (`_WRITES`), so that a row's stream stays its
  token's embedding through all layers, and tokens alone decide which experts serve a row: any two
  tokens choose independently, equal tokens choose alike.
* The embeddings of the tokens `KINDRED` share a direction with correlation `KINSHIP`: seven of them
  in one step have 34.9 distinct experts in place of 42, which is the 17 % of repeats that was
  observed with real text.
* The token map of the released tokenizer is not known here: neighbouring ids share compressed ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ultraflash.graphs.engram import engram_hashes
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import F32, U8, bf16_bits, e2m1_encode, e4m3_encode, pack_e2m1
from ultraflash.graphs.philox import philox
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.rotary import frequencies
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.table import TOKEN_MAP

KINDRED, KINSHIP = range(64, 192), 0.30
EMBEDDING_RMS = 0.12
# Gain of what sub-layers write into the streams. An emulated exchange gives a rank its own part as
# often as there are ranks: with 0.002 rows of a world of 8 had up to 2.5 % fewer experts than
# independent ones, of 4 at most 0.9 %.
_WRITES = 0.0005

# Deviation of matrices in units of fan_in^-0.5; (mean, deviation) of the rest.
_GAINS = {
    "head": 1.0, "attn.wq_a": 1.6, "attn.wq_b": 0.95, "attn.wkv": 1.8, "attn.wo_a": 1.6,
    "attn.wo_b": _WRITES, "attn.compressor.wkv": 40.0, "attn.compressor.wgate": 60.0,
    "attn.indexer.wk": 1.0, "attn.indexer.wq_b": 1.4, "attn.indexer.weights_proj": 40.0,
    "hc_attn_fn": 1.0, "hc_ffn_fn": 1.0, "ffn.gate": 2.9,
    "ffn.experts.w1": 1.5, "ffn.experts.w3": 1.5, "ffn.experts.w2": _WRITES,
    "ffn.shared_experts.w1": 1.5, "ffn.shared_experts.w3": 1.5, "ffn.shared_experts.w2": _WRITES,
    "engram.wkv": _WRITES, "main_proj": 1.5, "markov_head.head": 0.54,
    "confidence_head.proj": 2.0,
}  # fmt: skip
_NORMS = {
    "attn_norm": 0.025, "ffn_norm": 0.2, "attn.q_norm": 0.97, "attn.kv_norm": 0.4,
    "attn.compressor.norm": 0.6, "attn.indexer.k_norm": 0.5, "main_norm": 0.025, "norm": 1.0,
}  # fmt: skip
_PLAIN = {
    "embed": (0.0, EMBEDDING_RMS), "attn.attn_sink": (0.0, 1.0),
    "ffn.gate.bias": (0.0, 0.0), "ffn.gate.bias_vl": (0.0, 0.0),  # balanced: all experts alike
    "hc_attn_base": (0.0, 0.6), "hc_ffn_base": (0.0, 0.6),
    "hc_attn_scale": (0.65, 0.1), "hc_ffn_scale": (0.65, 0.1),
    "engram.q_weight": (1.0, 0.3), "engram.k_weight": (1.0, 0.3), "engram.embed": (0.0, 1.0),
    "markov_head.embed": (0.0, 1.0),
}  # fmt: skip
_ROLE = re.compile(r"^(?:layers|mtp)\.\d+\.")
# Of the codes alone, so that a group's largest about fills its format.
_E4M3_RMS, _E2M1_RMS = 110.0, 2.28
_E2M1_DEVIATION = 2.6  # of the normal values that codes of this rms are rounded from


@dataclass(frozen=True)
class Codes:
    """Bytes: `table` [256] of a random byte each."""

    key: int
    table: bytes

    def bytes(self, count: int) -> U8:
        """The first `count`."""
        words = _words(self.key, -(-count // 16))
        found: U8 = np.frombuffer(self.table, np.uint8)[words.astype("<u4").view(np.uint8)]
        return found.reshape(-1)[:count]


@dataclass(frozen=True)
class Normal:
    """Floats of a normal distribution."""

    key: int
    mean: float
    deviation: float

    def values(self, count: int) -> F32:
        """The first `count`."""
        words = _words(self.key, -(-count // 4)).astype(np.float64)
        u = ((words + 0.5) * 2.0**-32).reshape(-1, 2)
        length, angle = np.sqrt(-2 * np.log(u[:, 0])), 2 * np.pi * u[:, 1]
        z = np.stack([length * np.cos(angle), length * np.sin(angle)], axis=1).reshape(-1)
        return (self.mean + self.deviation * z[:count]).astype(np.float32)


Content = Codes | Normal


def key_of(name: str, rank: int, seed: int) -> int:
    """62 bits that name a buffer's contents."""
    digest = blake3(f"{seed}/{rank}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def weight_contents(ref: Ref, rank: int = 0, seed: int = 0) -> tuple[Content, ...]:
    """What each allocation of a stored weight holds: codes and, for quantised formats, scales.

    Raises:
        WeightsError: for a weight of which no statistics are known.
    """
    mean, deviation = _statistics(ref)
    key = key_of(ref.name, rank, seed)
    if ref.dtype in ("bf16", "f32"):
        return (Normal(key, mean, deviation),)
    table = _e2m1_table() if ref.dtype == "fp4" else _e4m3_table(_E4M3_RMS)
    rms = _E2M1_RMS if ref.dtype == "fp4" else _E4M3_RMS
    scale_key = key_of(f"{ref.name}.scale", rank, seed)
    return Codes(key, table), Codes(scale_key, _e8m0_table(deviation / rms))


def state_content(ref: Ref, seed: int = 0) -> Content:
    """What a state buffer of bytes or floats holds in the middle of a conversation.

    Raises:
        WeightsError: for a type that only the conversation can fill.
    """
    key = key_of(ref.name, 0, seed)
    if ref.dtype in ("bf16", "f32"):
        if ref.name == "draft.q":  # a distribution over the vocabulary
            return Normal(key, 1 / ref.shape[-1], 0.1 / ref.shape[-1])
        mean, deviation = (0.5, 0.1) if ref.name.endswith("pre") else (0.0, EMBEDDING_RMS)
        return Normal(key, mean, deviation)
    kind = ref.name.rpartition(".")[2]
    tables: dict[str, Callable[[], bytes]] = {
        "ring_codes": lambda: _e4m3_table(_E4M3_RMS),
        "ring_scales": lambda: _e8m0_table(0.4 / _E4M3_RMS),
        "main_codes": _e2m1_table,
        "main_scales": lambda: bytes(e4m3_encode(np.linspace(0.1, 0.3, 256, dtype=np.float32))),
        "key_codes": _e2m1_table,
        "key_scales": lambda: _e8m0_table(0.5 / _E2M1_RMS),
    }
    if ref.dtype != "u8" or kind not in tables:
        raise WeightsError(f"no synthetic contents are known for the state {ref}")
    return Codes(key, tables[kind]())


def constants(model: Model) -> dict[str, npt.NDArray[Any]]:
    """The weights that are computed: the real ones, except for the token map."""
    values: dict[str, npt.NDArray[Any]] = {f"rope.{t}": f for t, f in frequencies(model).items()}
    if model.engram_layers:
        values[TOKEN_MAP] = np.arange(model.vocab, dtype=np.int64) * model.engram_vocab
        values[TOKEN_MAP] //= model.vocab
    for layer, made in engram_hashes(model).items():
        values |= {f"layers.{layer}.engram.{name}": value for name, value in vars(made).items()}
    return values


def kindred_rows(hidden: int, seed: int = 0) -> npt.NDArray[np.uint16]:
    """bf16 bits of the embeddings of `KINDRED`, [tokens, hidden]."""
    rng = np.random.default_rng([seed, hidden])
    own = rng.standard_normal((len(KINDRED), hidden))
    shared = rng.standard_normal(hidden)
    mixed = EMBEDDING_RMS * (math.sqrt(KINSHIP) * shared + math.sqrt(1 - KINSHIP) * own)
    return bf16_bits(mixed.astype(np.float32))


def _statistics(ref: Ref) -> tuple[float, float]:
    role = _ROLE.sub("", ref.name)
    if role in _NORMS:
        return _NORMS[role], 0.15 * _NORMS[role]
    if role in _GAINS:
        return 0.0, _GAINS[role] * float(ref.shape[-1]) ** -0.5
    if role in _PLAIN:
        return _PLAIN[role]
    raise WeightsError(f"no statistics are known for the weight {ref}: add it to synthetic.py")


def _words(key: int, count: int) -> npt.NDArray[np.uint32]:
    """[count, 4], of counters 0, 1, ..."""
    low, high = key & 0x7FFFFFFF, key >> 31 & 0x7FFFFFFF
    counter = np.zeros((count, 4), np.uint32)
    counter[:, 0] = np.arange(count)
    return philox(np.full(count, high << 32 | low, np.uint64), counter)


def _quantiles(count: int) -> Iterator[float]:
    return (NormalDist().inv_cdf((i + 0.5) / count) for i in range(count))


def _e4m3_table(rms: float) -> bytes:
    return bytes(e4m3_encode(np.array([rms * z for z in _quantiles(256)], np.float32)))


def _e2m1_table() -> bytes:
    """Pairs of codes, each from four of the byte's bits."""
    codes = e2m1_encode(np.array([_E2M1_DEVIATION * z for z in _quantiles(16)], np.float32))
    pairs = np.stack(np.meshgrid(codes, codes, indexing="ij"), axis=-1)
    return bytes(pack_e2m1(pairs.reshape(-1)))


def _e8m0_table(rms: float) -> bytes:
    """Two neighbouring powers of two, mixed so that their mean square is `rms` squared."""
    low = math.floor(math.log2(rms))
    lower = round(256 * (4 - (rms / 2.0**low) ** 2) / 3)
    return bytes([low + 127] * lower + [low + 128] * (256 - lower))
