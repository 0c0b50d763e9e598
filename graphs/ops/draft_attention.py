"""Attention of a draft block: the window before it and the whole block, the same for all its rows
(model.md 6.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultraflash.graphs.numerics import F32, U8, q8_decode, to_bf16
from ultraflash.graphs.ops.attention import AttendShape, softmax_values, softmax_values_bf16
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class DraftAttention(Op):
    """Every row of a block attends to the W context rows before the block and to all B rows of it.

    The window does not slide inside a block; context rows come from the ring alone.

    Shapes:
        q: [S*B, H, E] bf16; codes: [S*B, E] u8; scales: [S*B, E/32] u8; ring_codes: [slots, R, E]
        u8; ring_scales: [slots, R, E/32] u8; sink: [H] f32; cos, sin: [S*B, rope/2] f32; slot,
        position: [S*B] i32; y: [S*B, H*E] bf16.
    """

    q: Ref
    codes: Ref
    scales: Ref
    ring_codes: Ref
    ring_scales: Ref
    sink: Ref
    cos: Ref
    sin: Ref
    slot: Ref
    position: Ref
    y: Ref
    window: int
    block: int
    round_weights: bool

    @staticmethod
    def reference(
        q: F32,
        codes: U8,
        scales: U8,
        ring_codes: U8,
        ring_scales: U8,
        sink: F32,
        cos: F32,
        sin: F32,
        slot: I32,
        position: I32,
        window: int,
        block: int,
        round_weights: bool,
    ) -> F32:
        """One product a sequence: its bits do not depend on how many sequences draft."""
        rows, heads, dim = q.shape
        sequences = rows // block
        last = position[::block] - 1
        before = last[:, None] - np.arange(window - 1, -1, -1)
        at = slot[::block, None], before & (ring_codes.shape[1] - 1)
        own = q8_decode(codes, scales).reshape(sequences, block, dim)
        keys = np.concatenate([q8_decode(ring_codes[at], ring_scales[at]), own], axis=1)
        valid = np.concatenate([before >= 0, np.ones((sequences, block), np.bool_)], axis=1)
        wide = keys.astype(np.float64)
        queries = q.reshape(sequences, block * heads, dim).astype(np.float64)
        dots = (queries @ wide.transpose(0, 2, 1)).astype(np.float32)
        logits = np.where(valid[:, None], dots * np.float32(dim**-0.5), np.float32(-np.inf))
        mix = softmax_values_bf16 if round_weights else softmax_values
        mixed = mix(logits, wide, np.tile(sink, block)).reshape(rows, heads, dim)
        return rotate(to_bf16(mixed), cos, -sin).reshape(rows, -1)

    @property
    def shape(self) -> AttendShape:
        """Of the launch."""
        rows, heads, dim = self.q.shape
        return AttendShape(rows, heads, dim, self.window + self.block, self.round_weights)

    def compiled(self) -> tuple[tuple[str, int], ...]:
        """Sizes of register tiles and shared memory."""
        return self.shape.compiled()

    def geometry(self) -> Geometry:
        """A cluster of CTAs for each row and 8 or 16 of its heads."""
        return self.shape.geometry()

    def state_bytes(self) -> int:
        """The window of every sequence."""
        rows, _, dim = self.q.shape
        return rows // self.block * self.window * (dim + dim // 32)

    def flops(self) -> int:
        """Scores and values."""
        rows, heads, dim = self.q.shape
        return 4 * rows * heads * dim * (self.window + self.block)
