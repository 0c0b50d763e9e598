"""The golden folder `tiny-a`: the authors' own numbers, opened once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ultraflash.tools.golden.data import Golden

TINY_A = Path(__file__).parents[1] / "golden" / "tiny-a"


@functools.cache
def golden() -> Golden:
    return Golden.open(TINY_A)


def tensors(stem: str) -> dict[str, npt.NDArray[Any]]:
    """The tensors of `expected/{stem}.safetensors`; bf16 ones as float32."""
    return golden().tensors(stem)
