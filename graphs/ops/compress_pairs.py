"""Two neighbouring tokens become one latent (model.md 4.5, ratio 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32, to_bf16
from ultraflash.graphs.plan import Op, Ref
from ultraflash.graphs.rows import I32, looked_back

_PREVIOUS = np.array([1])


@dataclass(frozen=True)
class CompressPairs(Op):
    """At odd positions, the gated mean of this token's and the previous token's projections; zeros
    at even ones.

    The previous token comes from this step's rows or from the ring of pending rows.

    Shapes:
        kv, gate: [T, E] f32; kv_ring, gate_ring: [slots, R, E] f32 (read only here); slot,
        position: [T] i32; row_start: [S+1] i32; y: [T, E] bf16, not yet normed.
    """

    kv: Ref
    gate: Ref
    kv_ring: Ref
    gate_ring: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    y: Ref

    @staticmethod
    def reference(
        kv: F32, gate: F32, kv_ring: F32, gate_ring: F32, slot: I32, position: I32, row_start: I32
    ) -> F32:
        """float32; the softmax over two is max-subtracted."""
        y = np.zeros_like(kv)
        odd = position % 2 == 1
        if not odd.any():
            return y
        kv0 = looked_back(kv, kv_ring, _PREVIOUS, slot, position, row_start)[odd, 0]
        gate0 = looked_back(gate, gate_ring, _PREVIOUS, slot, position, row_start)[odd, 0]
        peak = np.maximum(gate0, gate[odd])
        weight0, weight1 = np.exp(gate0 - peak), np.exp(gate[odd] - peak)
        total = weight0 + weight1
        y[odd] = to_bf16(weight0 / total * kv0 + weight1 / total * kv[odd])
        return y

    def state_bytes(self) -> int:
        """One pending row of each sequence."""
        return (self.row_start.shape[0] - 1) * 2 * 4 * self.kv.shape[1]
