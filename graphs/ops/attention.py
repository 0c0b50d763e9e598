"""Attention of all heads over the window and the selected global entries (model.md 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ultraflash.graphs.numerics import F32, F64, U8, q8_decode, qnv4_decode, to_bf16
from ultraflash.graphs.ops.rope import rotate
from ultraflash.graphs.plan import Geometry, Op, Ref
from ultraflash.graphs.rows import I32, looked_back

_KEY_GROUP = 64  # keys that the model authors' kernel takes at once


def softmax_values(logits: F32, keys: F64, sink: F32) -> F32:
    """sum_n w_n K_n / (sum_n w_n + exp(sink - max)), weights in fp32.

    Shapes:
        logits: [T, H, N] f32; keys: [T, N, E]; sink: [H]; result: [T, H, E] f32.
    """
    peak = logits.max(axis=-1, keepdims=True)
    weight = np.exp(logits - peak).astype(np.float64)
    total = weight.sum(axis=-1, keepdims=True) + np.exp(sink[:, None] - peak)
    mixed: F32 = ((weight @ keys) / total).astype(np.float32)
    return mixed


def softmax_values_bf16(logits: F32, keys: F64, sink: F32) -> F32:
    """The same with weights rounded to bf16, for close comparison in tests.

    As in the model authors' kernel, weights are relative to the running maximum of 64-key groups;
    only the value product sees them rounded, the denominator keeps fp32.
    """
    peak = np.full((*logits.shape[:2], 1), -np.inf, np.float32)
    values = np.zeros((*logits.shape[:2], keys.shape[2]))
    total = np.zeros((*logits.shape[:2], 1))
    for start in range(0, logits.shape[2], _KEY_GROUP):
        group = slice(start, start + _KEY_GROUP)
        # A finite floor: a group without any valid key must not make -inf - -inf.
        new_peak = np.maximum(
            np.maximum(peak, logits[..., group].max(axis=-1, keepdims=True)), np.float32(-1e30)
        )
        weight = np.exp(logits[..., group] - new_peak)
        keep = np.exp(peak - new_peak)
        values = values * keep + to_bf16(weight).astype(np.float64) @ keys[:, group]
        total = total * keep + weight.sum(axis=-1, keepdims=True, dtype=np.float64)
        peak = new_peak
    mixed: F32 = (values / (total + np.exp(sink[:, None] - peak))).astype(np.float32)
    return mixed


@dataclass(frozen=True)
class AttendShape:
    """How a row's heads are spread over CTAs, and what its kernel is compiled for.

    A step of few rows gives each of them a cluster of CTAs, which share the groups of keys; many
    rows are a CTA each. Sums have the same order either way.

    Shapes:
        rows of `heads` heads of `dim` elements; `count` keys at most.
    """

    rows: int
    heads: int
    dim: int
    count: int
    round_weights: bool

    _FEW: ClassVar[int] = 16  # rows: with more of them every SM has one anyway
    _SPLIT: ClassVar[int] = 5  # CTAs of a cluster at most: two groups each of the release's ten

    @property
    def groups(self) -> int:
        """Of 64 keys."""
        return -(-self.count // _KEY_GROUP)

    @property
    def split(self) -> int:
        """CTAs that share a row."""
        return min(self._SPLIT, self.groups) if self.rows <= self._FEW else 1

    @property
    def tiles(self) -> int:
        """Of 8 heads that one CTA takes."""
        return 1 if self.heads <= 8 else 2

    @property
    def pieces(self) -> int:
        """bf16 numbers that make a weight: two keep 16 bits of it, below the error of fp32 sums."""
        return 1 if self.round_weights else 2

    @property
    def stages(self) -> int:
        """Groups that a CTA holds at once, with 256 threads each."""
        return -(-self.groups // self.split) if self.split > 1 else 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory: `AttendShared` of ptx/uf/attend.cuh."""
        heads = 8 * self.tiles
        keys, query = _KEY_GROUP * 2 * (self.dim + 8), heads * 2 * self.dim
        weights = self.pieces * heads * 2 * (_KEY_GROUP + 8)
        logits = 2 * heads * 4 * (_KEY_GROUP + 4)
        table = 4 * heads * (3 * self.groups + 1)
        return self.stages * (keys + weights + logits + _KEY_GROUP) + query + table

    def compiled(self) -> tuple[tuple[str, int], ...]:
        """Sizes of register tiles and shared memory."""
        return (
            ("DIM", self.dim), ("TILES", self.tiles), ("GROUPS", self.groups),
            ("SPLIT", self.split), ("PIECES", self.pieces), ("SHARED", self.shared),
            ("THREADS", 256 * self.stages), ("CTAS", 2 if self.split == 1 else 1),
        )  # fmt: skip

    def geometry(self) -> Geometry:
        """A cluster of CTAs for each row and 8 or 16 of its heads."""
        blocks = -(-self.heads // (8 * self.tiles))
        return Geometry(self.rows * self.split, blocks, 256 * self.stages, self.shared)


@dataclass(frozen=True)
class Attention(Op):
    """Each row's heads over its last W window rows, then its selected entries; output rotated back.

    Window rows come from this step (`codes`, `scales`) or from the ring of earlier steps.

    Shapes:
        q: [T, H, E] bf16; codes: [T, E] u8; scales: [T, E/32] u8; ring_codes: [slots, R, E] u8;
        ring_scales: [slots, R, E/32] u8; main_codes: [slots, entries, E/2] u8; main_scales: [slots,
        entries, E/16] u8; sel: [T, k] i32, -1 = none; sink: [H] f32; cos, sin: [T, rope/2] f32;
        slot, position: [T] i32; row_start: [S+1] i32; y: [T, H*E] bf16. main_* and sel are absent
        in layers of ratio 0.
    """

    q: Ref
    codes: Ref
    scales: Ref
    ring_codes: Ref
    ring_scales: Ref
    main_codes: Ref | None
    main_scales: Ref | None
    sel: Ref | None
    sink: Ref
    cos: Ref
    sin: Ref
    slot: Ref
    position: Ref
    row_start: Ref
    window_start: Ref
    y: Ref
    window: int
    round_weights: bool

    @staticmethod
    def reference(
        q: F32,
        codes: U8,
        scales: U8,
        ring_codes: U8,
        ring_scales: U8,
        main_codes: U8 | None,
        main_scales: U8 | None,
        sel: I32 | None,
        sink: F32,
        cos: F32,
        sin: F32,
        slot: I32,
        position: I32,
        row_start: I32,
        window_start: I32,
        window: int,
        round_weights: bool,
    ) -> F32:
        """Each row is a product of its own: shapes, and so bits, do not depend on the number of
        rows.
        """
        back = np.arange(window - 1, -1, -1)
        keys = q8_decode(
            looked_back(codes, ring_codes, back, slot, position, row_start),
            looked_back(scales, ring_scales, back, slot, position, row_start),
        )
        valid = back <= (position - window_start)[:, None]
        if sel is not None and main_codes is not None and main_scales is not None:
            at = slot[:, None], np.maximum(sel, 0)
            keys = np.concatenate([keys, qnv4_decode(main_codes[at], main_scales[at])], axis=1)
            valid = np.concatenate([valid, sel >= 0], axis=1)
        wide = keys.astype(np.float64)
        dots = (q.astype(np.float64) @ wide.transpose(0, 2, 1)).astype(np.float32)
        logits = np.where(
            valid[:, None, :], dots * np.float32(q.shape[2] ** -0.5), np.float32(-np.inf)
        )
        mixed = (softmax_values_bf16 if round_weights else softmax_values)(logits, wide, sink)
        return rotate(to_bf16(mixed), cos, -sin).reshape(len(q), -1)

    @property
    def shape(self) -> AttendShape:
        """Of the launch."""
        count = self.window + (self.sel.shape[1] if self.sel else 0)
        rows, heads, dim = self.q.shape
        return AttendShape(rows, heads, dim, count, self.round_weights)

    def compiled(self) -> tuple[tuple[str, int], ...]:
        """Sizes of register tiles and shared memory."""
        return self.shape.compiled()

    def geometry(self) -> Geometry:
        """A cluster of CTAs for each row and 8 or 16 of its heads."""
        return self.shape.geometry()

    def state_bytes(self) -> int:
        """Window and selected entries of every row."""
        rows, _, dim = self.q.shape
        window = self.window * (dim + dim // 32)
        return rows * (window + (self.sel.shape[1] * (dim // 2 + dim // 16) if self.sel else 0))

    def flops(self) -> int:
        """Scores and values."""
        rows, heads, dim = self.q.shape
        return 4 * rows * heads * dim * (self.window + (self.sel.shape[1] if self.sel else 0))
