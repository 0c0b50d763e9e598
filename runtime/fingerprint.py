"""What must be equal for two servers to exchange caches (architecture.md section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from blake3 import blake3

from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Plan
from ultraflash.runtime import content, snapshot
from ultraflash.runtime.backend import Backend
from ultraflash.runtime.config import RuntimeConfig


def fingerprint(
    config: RuntimeConfig,
    backend: Backend,
    checkpoint_digest: str,
    model: Model,
    max_seq: int,
    plans: Sequence[Plan],
) -> str:
    """Hash over everything that decides the bits of a cache: weights, tokenizer, plans, world,
    backend, switches."""
    tokenizer = config.checkpoint / "tokenizer.json"
    facts = {
        "weights": checkpoint_digest,
        # Not all of it shows in a plan: rotary tables and hash constants are computed from it.
        "model": asdict(model),
        "tokenizer": blake3(tokenizer.read_bytes()).hexdigest(),
        "max_seq": max_seq,
        "world": backend.world,
        "plans": [p.digest() for p in plans],
        "content": content.VERSION,
        "snapshot": snapshot.VERSION,
        "prefill": config.prefill,
        "tail": None if config.prefill == "full" else config.tail,
        "attention_weights": config.attention_weights,
        "arch": backend.arch,
        "arithmetic": backend.facts(),
    }
    return blake3(msgspec.json.encode(facts, order="sorted")).hexdigest(length=16)
