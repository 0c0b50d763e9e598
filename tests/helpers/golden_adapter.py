"""The engine as plain functions, for comparers that are not ours.

    python3 COMPARER DIR --adapter tests/helpers/golden_adapter.py

`open(folder)` gives the engine; every other function takes it first and is a method of
`ultraflash.runtime.probe.Probe`. What the Probe lacks is not there either, so that a comparer can
skip it. `UF_BACKEND` and `UF_WORLD` choose the backend (numpy) and the number of ranks (1).
Attention weights are rounded to bf16 as the reference does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultraflash.runtime.probe import Probe

_MAX_SEQ = 512
_FUNCTIONS = (
    *("prefill", "prefill_images", "extend", "snapshot", "restore", "rollback"),
    *("begin", "advance", "forced_layer", "draft", "taps"),
    *("quant", "rope", "hash_rows", "sinkhorn", "gate", "resize_plan", "tower", "tokenize"),
)


def open(folder: str) -> Probe:
    return Probe.open(
        Path(folder),
        backend=os.environ.get("UF_BACKEND", "numpy"),
        world=int(os.environ.get("UF_WORLD", "1")),
        max_seq=_MAX_SEQ,
        attention_weights="bf16",
    )


def __getattr__(name: str) -> Callable[..., Any]:
    """A function of the engine, if the engine has it."""
    if name not in _FUNCTIONS or not hasattr(Probe, name):
        raise AttributeError(name)

    def call(engine: Probe, *arguments: Any) -> Any:
        return getattr(engine, name)(*arguments)

    return call
