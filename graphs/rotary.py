"""Rotary frequencies: float32 values formed in float32, since one ulp of the second is 0.06 rad at
a million positions.

Source: model.md section 3.4 (plain table; compressed table with YaRN).
"""

from __future__ import annotations

import math

import numpy as np

from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import F32

TABLES = ("plain", "compressed")


def frequencies(model: Model) -> dict[str, F32]:
    """Both tables, [rope_dim/2] f32: `plain` for window-only layers, `compressed` for layers with r
    > 0.
    """
    return {
        "plain": plain_frequencies(model.rope_theta, model.rope_dim),
        "compressed": yarn_frequencies(model),
    }


def plain_frequencies(theta: float, dims: int) -> F32:
    """1 / theta^(2j/dims), the power rounded to float32 correctly (float32 `power` is off by an ulp
    here and there).
    """
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    power = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / power


def yarn_frequencies(model: Model) -> F32:
    """Low frequencies stretched by the YaRN factor, high ones kept, a linear blend between."""
    dims = model.rope_dim
    base = plain_frequencies(model.compress_rope_theta, dims)

    def turns(count: float) -> float:
        """The pair whose wave turns `count` times within the original context."""
        span = math.log(model.yarn_original / (count * 2 * math.pi))
        return dims * span / (2 * math.log(model.compress_rope_theta))

    low = max(math.floor(turns(model.yarn_beta_fast)), 0)
    high = min(math.ceil(turns(model.yarn_beta_slow)), dims - 1)
    ramp = (np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        max(high - low, 1e-3)
    )
    keep = np.float32(1) - np.clip(ramp, 0, 1).astype(np.float32)
    low_part: F32 = base / np.float32(model.yarn_factor) * (np.float32(1) - keep)
    table: F32 = low_part + base * keep
    return table
