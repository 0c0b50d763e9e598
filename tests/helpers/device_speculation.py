"""The miniature engine of helpers/speculation.py with the device's own kernels in it: proposals
from `draft_sample`, verification by `accept`, many conversations a launch.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.device_inputs import Inputs
from helpers.device_ops import Ops
from helpers.ops import io, scratch, state
from helpers.speculation import Speculation, Toy
from ultraflash.graphs.numerics import F32
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.ops.draft_sample import DraftSample
from ultraflash.graphs.philox import U64
from ultraflash.graphs.plan import Ref
from ultraflash.graphs.rows import I32
from ultraflash.graphs.sampling import TOP_LOGPROBS

Array = npt.NDArray[Any]
BIASES = 4


def accept_op(rows: int, sequences: int, slots: int, block: int, vocab: int) -> Accept:
    """Of any size; `block` 0: nothing was drafted."""
    t, s = rows, sequences
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "mask": ((t, -(-vocab // 32)), "u32"),
        "bias_ids": ((s, BIASES), "i32"),
        "bias": ((s, BIASES), "f32"),
        "temperature": ((s,), "f32"),
        "top_p": ((s,), "f32"),
        "seed": ((s,), "u64"),
        "row_start": ((s + 1,), "i32"),
        "logprob": ((t,), "f32"),
        "top_ids": ((t, TOP_LOGPROBS), "i32"),
        "top_logprobs": ((t, TOP_LOGPROBS), "f32"),
    }
    shapes |= {name: ((t,), "i32") for name in ("ids", "slot", "position", "banned")}
    shapes |= {
        name: ((s,), "i32") for name in ("top_k", "step", "want_logprobs", "accepted", "token")
    }
    made: dict[str, Ref | None] = {n: io(n, *shape, dtype=d) for n, (shape, d) in shapes.items()}
    made["logits"] = scratch("logits", t, vocab, dtype="f32")
    made["q"] = state("q", slots, block, vocab, dtype="f32") if block else None
    return Accept(**made)  # type: ignore[arg-type]


def draft_op(sequences: int, slots: int, block: int, vocab: int, index: int) -> DraftSample:
    """Of any size."""
    s, rows = sequences, sequences * block
    return DraftSample(
        logits=scratch("logits", rows, vocab, dtype="f32"),
        markov=scratch("markov", s, vocab, dtype="f32"),
        at=scratch("at", rows, dtype="i32"),
        slot=scratch("slot", rows, dtype="i32"),
        bias_ids=io("bias_ids", s, BIASES),
        bias=io("bias", s, BIASES, dtype="f32"),
        temperature=io("temperature", s, dtype="f32"),
        top_p=io("top_p", s, dtype="f32"),
        top_k=io("top_k", s),
        seed=io("seed", s, dtype="u64"),
        step=io("step", s),
        drafts=io("drafts", s, block),
        q=state("q", slots, block, vocab, dtype="f32"),
        index=index,
        block=block,
    )


def neutral(op: Any) -> Inputs:
    """Inputs that mean nothing in particular: temperature 1, everything allowed, idle rows."""
    kinds = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "u64": np.uint64}
    fill = {"slot": -1, "bias_ids": -1, "banned": -1, "mask": 0xFFFFFFFF}
    fill |= {"temperature": 1, "top_p": 1}
    made = {}
    for f in fields(op):
        ref = getattr(op, f.name)
        if isinstance(ref, Ref) and f.name not in op.OUT:
            made[f.name] = np.full(ref.shape, fill.get(f.name, 0), kinds[ref.dtype])
    return made


class DeviceSpeculation(Speculation):
    """`sequences` conversations a launch at most."""

    def __init__(self, toy: Toy, width: str, ops: Ops, sequences: int) -> None:
        super().__init__(toy, "block", width)
        self._count = sequences
        size = sequences, sequences, toy.block, toy.vocab
        accept = accept_op(sequences * (toy.block + 1), *size)
        self._accept, self._accept_inputs = ops.hold(accept, {}), neutral(accept)
        drafts = [draft_op(*size, index) for index in range(toy.block)]
        self._draft = [ops.hold(op, {}) for op in drafts]
        self._draft_inputs = neutral(drafts[0])
        self._q: F32 = np.zeros((0, toy.block, toy.vocab), np.float32)

    def draft(self, seeds: U64, anchor: I32, first: I32, step: I32) -> I32:
        parts = [
            self._draft_some(seeds[own], anchor[own], first[own], step[own])
            for own in self._batches(len(anchor))
        ]
        drafts, q = zip(*parts, strict=True) if parts else ((), ())
        none = np.zeros((0, self.toy.block), np.int32)
        self._q = np.concatenate([self._q[:0], *q])
        return np.concatenate([none, *drafts])

    def step(
        self, seeds: U64, anchor: I32, drafts: I32, first: I32, step: I32
    ) -> tuple[I32, I32, I32]:
        before = np.concatenate([anchor[:, None], drafts], axis=1)
        kept = self.keep(before)
        parts = [
            self._verify_some(
                seeds[own], before[own], self._q[own], first[own], step[own], kept[own]
            )
            for own in self._batches(len(anchor))
        ]
        accepted, token = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        self.steps_by_accepted += np.bincount(accepted, minlength=self.toy.block + 1)
        self.steps_by_kept += np.bincount(kept, minlength=self.toy.block + 1)
        return accepted, token, drafts

    def _batches(self, count: int) -> list[slice]:
        return [slice(i, min(i + self._count, count)) for i in range(0, count, self._count)]

    def _draft_some(self, seeds: U64, anchor: I32, first: I32, step: I32) -> tuple[I32, F32]:
        n, block = len(anchor), self.toy.block
        made = {name: value.copy() for name, value in self._draft_inputs.items()}
        made["seed"][:n], made["step"][:n] = seeds, step
        made["slot"][: n * block] = np.arange(n).repeat(block)
        made["at"][: n * block] = (first[:, None] + np.arange(-1, block - 1)).ravel()
        before = anchor
        for index, held in enumerate(self._draft):
            rows = np.log(self.toy.draft[before]).astype(np.float32)
            made["logits"][np.arange(n) * block + index] = rows
            made |= held.run(made)  # drafts and q so far
            before = made["drafts"][:n, index]
        return made["drafts"][:n], made["q"][:n]

    def _verify_some(
        self, seeds: U64, before: I32, q: F32, first: I32, step: I32, kept: I32
    ) -> tuple[I32, I32]:
        n = len(before)
        made = {name: value.copy() for name, value in self._accept_inputs.items()}
        made["seed"][:n], made["step"][:n], made["q"][:n] = seeds, step, q
        ends = np.cumsum(1 + kept)
        made["row_start"][1:] = np.concatenate([ends, np.full(self._count - n, ends[-1])])
        rows = np.arange(self.toy.block + 1) <= kept[:, None]  # of each sequence
        own = slice(0, int(ends[-1]))
        tokens = before[rows]
        made["ids"][own] = tokens
        made["slot"][own] = np.arange(n).repeat(1 + kept)
        made["position"][own] = (first[:, None] - 1 + np.arange(rows.shape[1]))[rows]
        made["logits"][own] = np.log(self.toy.target[tokens])
        made["mask"][own] = self._masks()[tokens]
        out = self._accept.run(made)
        return out["accepted"][:n], out["token"][:n]

    def _masks(self) -> Array:
        """Bits of the tokens that may follow each token. [V+1, words]."""
        vocab = self.toy.vocab
        bits = np.zeros((vocab + 1, -(-vocab // 32) * 32), np.bool_)
        bits[:, :vocab] = self.toy.allowed
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
