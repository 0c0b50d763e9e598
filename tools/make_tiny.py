"""Write a small random checkpoint in the official layout, with every mechanism of the model.

The same preset and seed give the same files, byte for byte. Token ids, the number of compressed ids
and the sizes of the Engram tables follow from the tokenizer that is made along, whatever the
configuration says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ultraflash.graphs.checkpoint import expected_tensors, parameters, tensor_bytes
from ultraflash.graphs.config_keys import CONFIG_KEYS
from ultraflash.graphs.engram import table_rows
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.runtime.weights.token_map import compressed_ids
from ultraflash.runtime.weights.write import write_checkpoint
from ultraflash.tools.tiny_tokenizer import (
    BOS,
    EOS,
    IMAGE,
    PAD,
    SYSTEM,
    special_id,
    successors,
    tokenizer_config,
    tokenizer_json,
)
from ultraflash.tools.tiny_weights import TinyWeights

SHARD_BYTES = 3_500_000

# model.md section 8. Numbers of ids, tables and compressed ids are filled in from the tokenizer.
TINY = Model(
    vocab=512, hidden=256, num_layers=10, heads=8, head_dim=64, rope_dim=16, q_rank=64,
    o_groups=2, o_rank=64, window=16,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    kv_sources=(2, 4, 6), index_sources=(2, 4, 6, 8), index_heads=8, index_dim=32, index_topk=8,
    candidate_source=6, candidate_blocks=4, candidate_block_size=4, norm_eps=1e-20,
    experts=8, shared_experts=1, active_experts=3, expert_width=64,
    score_function="sqrtsoftplus", route_scale=1.5, swiglu_limit=10.0,
    rope_theta=10000.0, compress_rope_theta=160000.0,
    yarn_original=64, yarn_factor=4.0, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
    # Beyond 64 x 4 on purpose: a conversation should fit.
    max_position=8192,
    hc=4, sinkhorn_iters=20, hc_eps=1e-6,
    engram_layers=(1, 4), engram_rows=(0, 0), engram_max_order=4, engram_base=1000, engram_heads=2,
    engram_dim=32, engram_pad=2, engram_vocab=1,
    draft_stages=3, draft_block=5, draft_noise=0, draft_targets=(7, 8, 9), draft_markov_rank=32,
    draft_experts=4, draft_active_experts=2,
    bos=0, eos=1, pad=2, image_token=0,
    vision_layers=2, vision_dim=64, vision_heads=4, vision_width=96, vision_patch=14,
    vision_downsample=3, vision_max_tokens=64, vision_min_pixels=7056,
)  # fmt: skip
# Everything that is split over ranks divides by 8.
TP = replace(TINY, heads=16, o_groups=8, expert_width=256)
PRESETS = {"tiny": TINY, "tp": TP}

# What stands in the two files beside the keys that `Model` reads.
_NESTED: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "transformers_version": "5.6.0",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "rope_scaling": {"rope_type": "yarn"},
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "rope_theta": 10000,
        "max_wh_ratio": None,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}
_FLAT = {
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "vision_rope_theta": 10000,
    "vision_max_wh_ratio": None,
}


def make_tiny(out: Path, model: Model, seed: int = 0) -> Model:
    """Write the checkpoint into `out` and return the model as it was written.

    Raises:
        ValueError: when the vocabulary is too small for bytes and special tokens, or when there is
            a checkpoint in `out` already.
        GraphError: when the completed configuration contradicts itself.
    """
    if (out / "config.json").exists() or any(out.glob("*.safetensors")):
        raise ValueError(f"{out} holds a checkpoint already: choose another folder or empty it")
    text = tokenizer_json(model.vocab)
    tokenizer = Tokenizer.from_str(text)
    model = completed(model, tokenizer)
    weights = TinyWeights(model, seed, successors(tokenizer))
    write_settings(out, model, text)
    write_checkpoint(out, weights.specs, weights, SHARD_BYTES)
    return model


def write_settings(out: Path, model: Model, tokenizer: str) -> None:
    """Everything that stands beside the weights: configurations and the tokenizer."""
    (out / "inference").mkdir(parents=True, exist_ok=True)
    nested, flat = config_files(model)
    for name, value in (
        ("config.json", nested),
        ("inference/config.json", flat),
        ("tokenizer_config.json", tokenizer_config(model.max_position)),
    ):
        content = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        (out / name).write_text(content, encoding="utf-8")
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")


def completed(model: Model, tokenizer: Tokenizer) -> Model:
    """The model with everything that follows from the tokenizer put right."""
    numbers = compressed_ids(tokenizer)
    pad = special_id(tokenizer, PAD)
    return replace(
        model,
        bos=special_id(tokenizer, BOS),
        eos=special_id(tokenizer, EOS),
        pad=pad,
        draft_noise=special_id(tokenizer, SYSTEM),
        image_token=special_id(tokenizer, IMAGE) if model.vision_layers else -1,
        engram_pad=pad,
        engram_vocab=int(numbers.max()) + 1,
        engram_rows=table_rows(model),
    )


def config_files(model: Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` (nested) and `inference/config.json` (flat) that `Model` reads back."""
    nested: dict[str, Any] = json.loads(json.dumps(_NESTED))
    flat: dict[str, Any] = dict(_FLAT)
    for name, value in _plain_values(model):
        path, key = CONFIG_KEYS[name]
        *parents, last = path.split(".")
        node = nested
        for parent in parents:
            node = node[parent]
        node[last] = value
        if key:
            flat[key] = value
    return nested, flat


def _plain_values(model: Model) -> Iterator[tuple[str, Any]]:
    for field in fields(model):
        value = getattr(model, field.name)
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, float) and value == int(value):
            value = int(value)  # the release writes whole numbers without a point
        yield field.name, value


def _wished(path: Path) -> Model:
    try:
        return Model.from_config(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0, or 2 when the request makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.make_tiny",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", type=Path, metavar="FILE", help="a config.json to follow")
    which.add_argument(
        "--preset",
        choices=PRESETS,
        default="tiny",
        help="tiny: 10 MB, every mechanism; tp: splits over 1, 2, 4 and 8 ranks (default tiny)",
    )
    options = parser.parse_args(arguments)
    try:
        if options.seed < 0:
            raise ValueError(f"--seed must not be negative, got {options.seed}")
        model = PRESETS[options.preset]
        if options.config:
            model = _wished(options.config)
        model = make_tiny(options.out, model, options.seed)
    except OSError as error:
        print(f"{error.filename} cannot be used: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, GraphError) as error:
        print(error, file=sys.stderr)
        return 2
    specs = expected_tensors(model)
    print(
        f"{options.out}: {len(specs)} tensors, {sum(map(parameters, specs.values())):,} "
        f"parameters, {sum(map(tensor_bytes, specs.values())):,} bytes"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
