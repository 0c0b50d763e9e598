"""Every size of the model, read once from the checkpoint's configuration.

`Model` is frozen and knows no tensors, files or devices. Its field names are the letters and words
that plans,
weights and tests use. Source: model.md section 1; the keys of both shipped files are in `_KEYS`.

Dimension letters used in docstrings of this room: T rows, D hidden, C hyper-connection copies, H
heads of one rank,
E head dim, W window, V vocabulary, G output groups of one rank, K selected entries, F expert width
of one rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ultraflash.graphs.contradictions import contradictions
from ultraflash.graphs.errors import ConfigError, WorldError

# field -> (path in config.json, key in inference/config.json). The nested file is asked first, the
# flat one second.
_KEYS: dict[str, tuple[str, str]] = {
    "vocab": ("text_config.vocab_size", "vocab_size"),
    "hidden": ("text_config.hidden_size", "dim"),
    "num_layers": ("text_config.num_hidden_layers", "n_layers"),
    "heads": ("text_config.num_attention_heads", "n_heads"),
    "head_dim": ("text_config.head_dim", "head_dim"),
    "rope_dim": ("text_config.qk_rope_head_dim", "rope_head_dim"),
    "q_rank": ("text_config.q_lora_rank", "q_lora_rank"),
    "o_groups": ("text_config.o_groups", "o_groups"),
    "o_rank": ("text_config.o_lora_rank", "o_lora_rank"),
    "window": ("text_config.sliding_window", "window_size"),
    "compress_ratios": ("text_config.compress_ratios", "compress_ratios"),
    "kv_sources": ("text_config.kv_source_layer_ids", "kv_source_layers"),
    "index_sources": ("text_config.index_source_layer_ids", "index_source_layers"),
    "index_heads": ("text_config.index_n_heads", "index_n_heads"),
    "index_dim": ("text_config.index_head_dim", "index_head_dim"),
    "index_topk": ("text_config.index_topk", "index_topk"),
    "candidate_source": ("text_config.candidate_source_layer_id", "candidate_source_layer"),
    "candidate_blocks": ("text_config.candidate_topk_blocks", "candidate_topk_blocks"),
    "candidate_block_size": ("text_config.candidate_block_size", "candidate_block_size"),
    "norm_eps": ("text_config.rms_norm_eps", "norm_eps"),
    "experts": ("text_config.n_routed_experts", "n_routed_experts"),
    "shared_experts": ("text_config.n_shared_experts", "n_shared_experts"),
    "active_experts": ("text_config.num_experts_per_tok", "n_activated_experts"),
    "expert_width": ("text_config.moe_intermediate_size", "moe_inter_dim"),
    "score_function": ("text_config.scoring_func", "score_func"),
    "route_scale": ("text_config.routed_scaling_factor", "route_scale"),
    "swiglu_limit": ("text_config.swiglu_limit", "swiglu_limit"),
    "rope_theta": ("text_config.rope_theta", "rope_theta"),
    "compress_rope_theta": ("text_config.compress_rope_theta", "compress_rope_theta"),
    "yarn_original": (
        "text_config.rope_scaling.original_max_position_embeddings",
        "original_seq_len",
    ),
    "yarn_factor": ("text_config.rope_scaling.factor", "rope_factor"),
    "yarn_beta_fast": ("text_config.rope_scaling.beta_fast", "beta_fast"),
    "yarn_beta_slow": ("text_config.rope_scaling.beta_slow", "beta_slow"),
    "max_position": ("text_config.max_position_embeddings", ""),
    "hc": ("text_config.hc_mult", "hc_mult"),
    "sinkhorn_iters": ("text_config.hc_sinkhorn_iters", "hc_sinkhorn_iters"),
    "hc_eps": ("text_config.hc_eps", "hc_eps"),
    "engram_layers": ("text_config.engram_layer_ids", "engram_layer_ids"),
    "engram_rows": ("text_config.engram_num_embeddings", "engram_num_embeddings"),
    "engram_max_order": ("text_config.engram_max_ngram_size", "engram_max_ngram_size"),
    "engram_base": ("text_config.engram_vocab_size", "engram_vocab_size"),
    "engram_heads": ("text_config.engram_n_heads", "engram_n_heads"),
    "engram_dim": ("text_config.engram_head_dim", "engram_head_dim"),
    "engram_pad": ("text_config.engram_pad_token_id", "engram_pad_id"),
    "engram_vocab": ("text_config.engram_compressed_vocab_size", "engram_compressed_vocab_size"),
    "draft_stages": ("text_config.num_nextn_predict_layers", "n_mtp_layers"),
    "draft_block": ("text_config.dspark_block_size", "dspark_block_size"),
    "draft_noise": ("text_config.dspark_noise_token_id", "dspark_noise_token_id"),
    "draft_targets": ("text_config.dspark_target_layer_ids", "dspark_target_layer_ids"),
    "draft_markov_rank": ("text_config.dspark_markov_rank", "dspark_markov_rank"),
    "draft_experts": ("text_config.dspark_n_routed_experts", "dspark_n_routed_experts"),
    "draft_active_experts": (
        "text_config.dspark_num_experts_per_tok",
        "dspark_n_activated_experts",
    ),
    "bos": ("bos_token_id", ""),
    "eos": ("eos_token_id", ""),
    "pad": ("pad_token_id", ""),
    "image_token": ("image_token_id", "image_token_id"),
    "vision_layers": ("vision_config.num_hidden_layers", "vision_n_layers"),
    "vision_dim": ("vision_config.hidden_size", "vision_dim"),
    "vision_heads": ("vision_config.num_attention_heads", "vision_n_heads"),
    "vision_width": ("vision_config.intermediate_size", "vision_inter_dim"),
    "vision_patch": ("vision_config.patch_size", "vision_patch_size"),
    "vision_downsample": ("vision_config.downsample_ratio", "vision_downsample_ratio"),
    "vision_max_tokens": ("vision_config.max_image_tokens", "vision_max_n_token"),
    "vision_min_pixels": ("vision_config.min_pixels", "vision_min_pixels"),
}
# Keys that only one file has, or that may be absent altogether: model.md sections 1.1 and 1.4
# ("presence pitfall").
_DEFAULTS: dict[str, Any] = {
    "max_position": 1048576,
    "bos": 0,
    "eos": 1,
    "pad": 2,
    "image_token": -1,
    "score_function": "sqrtsoftplus",
    "vision_layers": 0,
    "vision_dim": 0,
    "vision_heads": 0,
    "vision_width": 0,
    "vision_patch": 14,
    "vision_downsample": 3,
    "vision_max_tokens": 0,
    "vision_min_pixels": 0,
}


@dataclass(frozen=True)
class Model:
    """The sizes of one checkpoint; field meanings as in model.md section 1."""

    vocab: int
    hidden: int
    num_layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int
    norm_eps: float
    experts: int
    shared_experts: int
    active_experts: int
    expert_width: int
    score_function: str
    route_scale: float
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    yarn_original: int
    yarn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    max_position: int
    hc: int
    sinkhorn_iters: int
    hc_eps: float
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    engram_max_order: int
    engram_base: int
    engram_heads: int
    engram_dim: int
    engram_pad: int
    engram_vocab: int
    draft_stages: int
    draft_block: int
    draft_noise: int
    draft_targets: tuple[int, ...]
    draft_markov_rank: int
    draft_experts: int
    draft_active_experts: int
    bos: int
    eos: int
    pad: int
    image_token: int
    vision_layers: int
    vision_dim: int
    vision_heads: int
    vision_width: int
    vision_patch: int
    vision_downsample: int
    vision_max_tokens: int
    vision_min_pixels: int

    def __post_init__(self) -> None:
        """Refuse values that contradict each other.

        Raises:
            ConfigError: naming every contradiction found.
        """
        problems = contradictions(self)
        if problems:
            raise ConfigError("model configuration does not work: " + "; ".join(problems))

    @classmethod
    def from_config(
        cls, nested: Mapping[str, Any] | None, flat: Mapping[str, Any] | None = None
    ) -> Model:
        """Build from the parsed `config.json` and, for keys it lacks, the parsed
        `inference/config.json`.

        Raises:
            ConfigError: naming every key that neither file has, or a value of the wrong type.
        """
        values: dict[str, Any] = {}
        missing: list[str] = []
        for name, (path, key) in _KEYS.items():
            value = _dig(nested, path)
            if value is None:
                value = _dig(flat, key)
            if value is None:
                value = _DEFAULTS.get(name)
            if value is None:
                missing.append(path or key)
            else:
                values[name] = value
        if missing:
            raise ConfigError(
                f"config.json lacks {', '.join(missing)}; was it written for another model?"
            )
        return cls(**{f.name: _typed(f.name, str(f.type), values[f.name]) for f in fields(cls)})

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Model:
        """Read `config.json` (or `inference/config.json`, or both) of a checkpoint folder.

        Raises:
            ConfigError: when neither file is there, one is not JSON, or keys are missing.
        """
        nested, flat = (
            _read_json(folder / name) for name in ("config.json", "inference/config.json")
        )
        if nested is None and flat is None:
            raise ConfigError(
                f"{folder} holds no config.json: give the folder of an official-layout checkpoint"
            )
        return cls.from_config(nested, flat)

    # --- which layer does what (model.md section 4.9) ---

    def ratio(self, layer: int) -> int:
        """Compression ratio r of a layer: 0 (window only), 1 or 2."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The nearest KV source layer at or below `layer`, whose entries it attends to (r > 0
        only)."""
        return max(s for s in self.kv_sources if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` uses (r > 0 only)."""
        return max(s for s in self.index_sources if s <= layer)

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last KV source (model.md section 4.10)."""
        return self.kv_sources[-1]

    # --- derived sizes ---

    @cached_property
    def heads_per_group(self) -> int:
        """Attention heads whose outputs one output group concatenates."""
        return self.heads // self.o_groups

    @property
    def engram_orders(self) -> int:
        """How many n-gram orders are hashed: 2 .. engram_max_order."""
        return self.engram_max_order - 1

    @property
    def engram_columns(self) -> int:
        """Table rows gathered for one token and layer."""
        return self.engram_orders * self.engram_heads

    @property
    def tap_width(self) -> int:
        """Width of the drafting input: one mean stream for each target layer."""
        return len(self.draft_targets) * self.hidden

    @property
    def index_scale(self) -> float:
        """(index_dim * index_heads)^-0.5, the factor on index weights; a power of two (checked)."""
        return float((self.index_dim * self.index_heads) ** -0.5)

    # --- shards ---

    def check_world(self, world: int) -> None:
        """Refuse a number of ranks that does not divide everything that is split.

        Raises:
            WorldError: naming every size that `world` does not divide.
        """
        if world < 1:
            raise WorldError(f"world must be at least 1, got {world}")
        split = {
            "attention heads": self.heads,
            "output groups": self.o_groups,
            "output groups x rank / 32": self.o_groups * self.o_rank // 32,
            "index heads": self.index_heads,
            "expert width / 32": self.expert_width // 32,
            "vocabulary": self.vocab,
        }
        bad = [f"{name} ({size})" for name, size in split.items() if size % world]
        if bad:
            fits = [
                w for w in range(1, self.heads + 1) if not any(size % w for size in split.values())
            ]
            raise WorldError(
                f"world {world} does not divide {', '.join(bad)}; "
                f"this model can be split over {fits}"
            )


def _dig(tree: Mapping[str, Any] | None, path: str) -> Any:
    node: Any = tree
    for key in path.split(".") if path else ():
        if not isinstance(node, Mapping):
            return None
        node = node.get(key)
    return node if path else None


def _typed(name: str, kind: str, value: Any) -> Any:
    # JSON as Python reads it knows NaN and infinities.
    number = type(value) is int or (type(value) is float and math.isfinite(value))
    if kind == "int" and number and value == int(value):
        return int(value)
    if kind == "float" and number:
        return float(value)
    if kind == "str" and isinstance(value, str):
        return value
    if (
        kind == "tuple[int, ...]"
        and isinstance(value, list | tuple)
        and all(type(v) is int for v in value)
    ):
        return tuple(value)
    raise ConfigError(f"config value {_KEYS[name][0] or name} should be {kind}, got {value!r}")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object")
    return value
