"""Every size of the model, read once from the checkpoint's configuration.

`Model` is frozen and knows no tensors, files or devices. Its field names are the letters and words
that plans, weights and tests use. Source: model.md section 1; the keys of both shipped files are in
`config_keys.py`.

Dimension letters used in docstrings of this room: T rows, D hidden, C hyper-connection copies, H
heads of one rank, E head dim, W window, V vocabulary, G output groups of one rank, K selected
entries, F expert width of one rank.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ultraflash.graphs.config_keys import CONFIG_KEYS, DEFAULTS, FIXED_KEYS
from ultraflash.graphs.contradictions import contradictions
from ultraflash.graphs.errors import ConfigError, WorldError

_NESTED, _FLAT = "config.json", "inference/config.json"
_log = logging.getLogger(__name__)


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
        `inference/config.json`. Where the second fills a gap or differs, a warning is logged.

        Raises:
            ConfigError: naming every key that neither file has, a value of the wrong type or one
                that the operations do not compute, or a first file that is none for such a model.
        """
        if nested is not None and flat and not isinstance(nested.get("text_config"), Mapping):
            raise ConfigError(
                f"{_NESTED} has no object text_config, it is damaged or another model's: restore "
                f"it, or remove it so that {_FLAT} holds"
            )
        _refuse_other_computations({_NESTED: nested, _FLAT: flat})
        if nested is not None and flat is not None:
            _compare(nested, flat)
        values: dict[str, Any] = {}
        missing: list[str] = []
        for name, (path, key) in CONFIG_KEYS.items():
            value = _dig(nested, path)
            if value is None:
                value = _dig(flat, key)
            if value is None:
                value = DEFAULTS.get(name)
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
        nested, flat = (_read_json(folder / name) for name in (_NESTED, _FLAT))
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
        only).
        """
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


def _refuse_other_computations(files: Mapping[str, Mapping[str, Any] | None]) -> None:
    for path, key, supported in FIXED_KEYS:
        for file, name in zip(files, (path, key), strict=True):
            value = _dig(files[file], name)
            if value is not None and value != supported:
                raise ConfigError(
                    f"{file} says {name} = {value!r}, and only {supported!r} is computed here: "
                    f"take a checkpoint that was trained so"
                )


def _compare(nested: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
    """Say where the second file fills a gap of the first, and where it says something else."""
    for path, key in CONFIG_KEYS.values():
        first, second = _dig(nested, path), _dig(flat, key)
        if second is None or first == second:
            continue
        if first is None:
            _tell(f"{_NESTED} lacks {path}: {key} = {second!r} of {_FLAT} is taken")
        else:
            _tell(f"{_NESTED} says {path} = {first!r} and holds; {_FLAT} says {key} = {second!r}")


@cache
def _tell(text: str) -> None:
    """Log it once a process: a configuration is read several times."""
    _log.warning(text)


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
    raise ConfigError(
        f"config value {CONFIG_KEYS[name][0] or name} should be {kind}, got {value!r}"
    )


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
