"""Random plausible inputs of any operation, by the meaning of its fields.

Scale bytes keep values sane; selections ascend and end in -1. Weights come as a checkpoint stores
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.device_rows import FAR, Rows, rows_of
from helpers.device_weights import ALPHABET, Shelf, tiled
from helpers.values import activations, angles, codes_without_nan
from ultraflash.graphs.numerics import fake_q8, qmx4, qmx4_decode
from ultraflash.graphs.ops.expert_rows import ExpertRows
from ultraflash.graphs.ops.experts_up import wide_rows
from ultraflash.graphs.plan import Life, Op, Ref
from ultraflash.graphs.sampling import add_bias, constrain, distribution

Array = npt.NDArray[Any]
I32 = npt.NDArray[np.int32]
Inputs = dict[str, Any]  # field -> array, or Stored for a weight

# Types that arrays have on the host, by the plan's words.
HOST: dict[str, Any] = {
    "bf16": np.float32, "f32": np.float32, "i32": np.int32, "u32": np.uint32,
    "i64": np.int64, "u64": np.uint64, "u8": np.uint8,
}  # fmt: skip


def make_inputs(op: Op, rng: np.random.Generator, shelf: Shelf, early: bool = False) -> Inputs:
    """Everything that `op` reads or updates, by field."""
    rows = rows_of(op, rng, early)
    made: Inputs = {}
    for name, ref in op.refs:
        if name in op.OUT:
            continue
        if ref.life is Life.WEIGHT:
            made[name] = shelf.weight(op, name, ref)
        elif rows is not None and name in ("slot", "position", "row_start"):
            made[name] = getattr(rows, name)
        elif rows is not None and name == "at":
            made[name] = rows.position
        else:
            made[name] = _field(op, name, ref, rng)
    special = _SPECIAL.get(type(op).__name__)
    if special:
        special(op, made, rng, rows)
    if "cos" in made:
        made["cos"], made["sin"] = angles(rng, *made["cos"].shape)
    for name, ref in op.refs:  # the device takes bytes as they are
        if name in made and ref.life is not Life.WEIGHT:
            kind = HOST[ref.dtype]
            assert made[name].dtype == kind, f"{name} is {made[name].dtype}, not {kind}"
            assert made[name].shape == ref.shape, f"{name} is {made[name].shape}, not {ref.shape}"
    return made


def _field(op: Op, name: str, ref: Ref, rng: np.random.Generator) -> Array:
    """A value by its name, or else by its type."""
    if name == "is_image":
        return (rng.random(ref.shape) < 0.25).astype(np.int32)
    if "codes" in name:
        return tiled(ref.shape, lambda n: codes_without_nan(rng, n))
    if "scales" in name:  # E4M3 of global entries, E8M0 elsewhere
        low, high = (40, 60) if name == "main_scales" or _is_nv4(op) else (117, 122)
        return tiled(ref.shape, lambda n: rng.integers(low, high, n).astype(np.uint8))
    if name in ("pre", "post", "comb"):
        return rng.random(ref.shape).astype(np.float32)
    return plain(rng, ref)


def _is_nv4(op: Op) -> bool:
    return type(op).__name__ == "StoreMainKv"


def plain(rng: np.random.Generator, ref: Ref) -> Array:
    """Any values of a type."""
    if ref.dtype == "bf16":
        return activations(rng, *ref.shape, spread=1.0)
    if ref.dtype == "f32":
        return tiled(ref.shape, lambda n: rng.normal(size=n).astype(np.float32))
    top = {"u8": 255, "i32": 500, "i64": 5000, "u32": 2**32, "u64": 2**64}[ref.dtype]
    return rng.integers(0, top, ref.shape, dtype=HOST[ref.dtype])


def _linear(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    if op.w.dtype == "fp8":
        made["x"] = fake_q8(made["x"])


def _embed(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    made["ids"] = rng.integers(0, op.table.shape[0], op.ids.shape).astype(np.int32)


def _markov_embed(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    for name in ("anchor", "drafts"):
        made[name] = rng.integers(0, op.table.shape[0], made[name].shape).astype(np.int32)


def _engram_ids(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    made["ids"] = rng.integers(0, op.token_map.shape[0], op.ids.shape).astype(np.int32)


def _engram_hash(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    for name in ("ids", "history"):
        shape = made[name].shape
        ids = rng.integers(0, min(op.token_map.shape[0], ALPHABET), shape)
        made[name] = np.where(rng.random(shape) < 0.15, -1, ids).astype(np.int32)


def _engram_gather(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    made["rows"] = rng.integers(0, op.table.shape[0], op.rows.shape)


def _experts(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    experts = (op.w1 if hasattr(op, "w1") else op.w2).shape[0]
    made["ids"] = chosen_experts(rng, op.ids.shape, experts)
    if op.chunks is not None:
        made["order"], made["chunks"] = sorted_rows(made["ids"], experts, op.chunks)
    if "weight" in made:
        made["weight"] = rng.uniform(0.01, 1.5, op.weight.shape).astype(np.float32)
    name = "x" if "x" in made else "z"
    made[name] = fake_q8(made[name])


def chosen_experts(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> I32:
    """Distinct ascending experts a row, some chosen far more often than others."""
    liking = rng.gumbel(size=(shape[0], experts)) + rng.normal(size=experts)
    return np.sort(np.argsort(-liking, axis=1)[:, : shape[1]], axis=1).astype(np.int32)


def sorted_rows(ids: I32, experts: int, chunks: Ref) -> tuple[I32, I32]:
    """Order and chunks; a buffer for more experts than there are has room for more chunks."""
    order, some = ExpertRows.reference(ids, experts, wide_rows(ids.size, experts) or 1)
    padded = np.zeros(chunks.shape, np.int32)
    padded[: len(some)] = some
    return order, padded


def _expert_rows(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    made["ids"] = chosen_experts(rng, op.ids.shape, op.experts)


def _index_scores(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    made["q"] = qmx4_decode(*qmx4(made["q"]))
    made["codes"] = tiled(op.codes.shape, lambda n: rng.integers(0, 256, n).astype(np.uint8))
    if op.pool:
        reach = (made["position"] + 1) // op.ratio
        made["pool"] = np.stack([_pool(rng, int(n), op) for n in reach])


def _scores(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    assert rows is not None
    scores = made["scores"]
    if rng.random() < 0.5:  # many equal ones
        scores = np.round(scores * 8) / np.float32(8)
    reach = (made["position"] + 1) // op.ratio
    entries = np.arange(scores.shape[1])[None]
    if "pool" in made:  # scores stand in its order
        made["pool"] = np.stack([_pool(rng, int(n), op) for n in reach])
        blocks = np.where(made["pool"] < 0, 1 << 24, made["pool"])[:, :, None]
        inside = blocks * op.block_size + np.arange(op.block_size)
        entries = inside.reshape(len(scores), -1)[:, : scores.shape[1]]
    made["scores"] = np.where(entries >= reach[:, None], np.float32(-np.inf), scores)


def _pool(rng: np.random.Generator, reach: int, op: Any) -> I32:
    size, kept = op.block_size, op.pool.shape[1]
    pool, count = np.full(kept, -1, np.int32), -(-reach // size)
    if count <= kept:
        pool[:count] = np.arange(count)
    else:  # the newest block is always among them
        pool[:] = [*np.sort(rng.permutation(count - 1)[: kept - 1]), count - 1]
    return pool


def _attention(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    assert rows is not None
    start = made["position"] * 0
    for _, first, end in rows.each():
        if end > first and rng.random() < 0.3:  # a replay: windows do not reach back to 0
            start[first:end] = rng.integers(0, made["position"][first] + 1)
    made["window_start"] = start
    if op.sel is None:
        return
    made["main_codes"] = tiled(
        op.main_codes.shape, lambda n: rng.integers(0, 256, n).astype(np.uint8)
    )
    count, k = op.sel.shape
    sel = np.full((count, k), -1, np.int32)
    for row in range(count):
        n = min(int(rng.choice([0, k // 2 + 1, k])), op.main_codes.shape[1])
        sel[row, :n] = np.sort(rng.permutation(op.main_codes.shape[1])[:n])
    made["sel"] = sel


def _draft_rows(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    assert rows is not None
    most = np.maximum(np.diff(rows.row_start), 1)
    made["accepted"] = rng.integers(0, most).astype(np.int32)


def _follow_rows(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    """Now and then the host's own step; answers that end soon or late, rows shared in every way."""
    sequences, slots = op.follows.shape[0], op.next_ids.shape[0]
    if rng.random() < 0.2:
        made["follows"] = np.full(sequences, -1, np.int32)
        return
    made["follows"] = rng.permutation(slots)[:sequences].astype(np.int32)
    made["next_at"] = rng.integers(0, FAR, op.next_at.shape).astype(np.int32)
    start = made["next_at"][made["follows"], 0]
    for name in ("end", "ban_end"):
        made[name] = (start + rng.integers(0, 12, sequences)).astype(np.int32)
    if op.chance is None:
        return
    block = op.threshold.shape[0]
    most = (op.ids.shape[0] - sequences) // sequences  # rows of a sequence's own are always there
    made["own"] = np.minimum(rng.integers(-1, block + 1, sequences), most).astype(np.int32)
    made["chance"] = np.sort(rng.random(op.chance.shape)).astype(np.float32)
    made["next_confidence"] = rng.normal(2, 4, op.next_confidence.shape).astype(np.float32)
    if rng.random() < 0.5:  # equal survivals
        made["next_confidence"][1:] = made["next_confidence"][0]
    made["threshold"] = np.sort(rng.random(block) ** 2)[::-1].astype(np.float32)
    made["price"] = np.sort(rng.random(op.price.shape) ** 3).astype(np.float32)


def _last_io(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    made["ids"] = rng.integers(0, 500, op.ids.shape).astype(np.int32)


def _asks(made: Inputs, rng: np.random.Generator, sequences: int, vocab: int) -> None:
    """Sampling parameters of every sequence."""
    greedy, open_p, open_k = (rng.random((3, sequences)) < 0.35).astype(bool)
    made["temperature"] = np.where(greedy, 0, rng.uniform(0.3, 1.6, sequences)).astype(np.float32)
    made["top_p"] = np.where(open_p, 1, rng.uniform(0.3, 0.99, sequences)).astype(np.float32)
    few = rng.integers(1, max(2, vocab // 2), sequences)
    made["top_k"] = np.where(open_k, 0, few).astype(np.int32)
    made["seed"] = rng.integers(0, 2**64, sequences, dtype=np.uint64)
    made["step"] = rng.integers(0, 1000, sequences).astype(np.int32)
    ids, bias = made["bias_ids"], made["bias"]
    used = rng.random(ids.shape) < min(1, 3 / ids.shape[1])
    made["bias_ids"] = np.where(used, rng.integers(0, vocab, ids.shape), -1).astype(np.int32)
    made["bias"] = (2 * bias).astype(np.float32)


def _spread(logits: Array, rng: np.random.Generator) -> Array:
    """Wider; in half of the cases with many equal ones."""
    wide: Array = (2 * logits).astype(np.float32)
    return np.round(wide * 2) / np.float32(2) if rng.random() < 0.5 else wide


def _accept(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    assert rows is not None
    count, vocab = op.logits.shape
    _asks(made, rng, len(rows.row_start) - 1, vocab)
    made["want_logprobs"] = (rng.random(op.want_logprobs.shape) < 0.5).astype(np.int32)
    logits = _spread(made["logits"], rng)
    logits[np.arange(count), rng.integers(0, vocab, count)] += np.float32(5)
    made["logits"] = logits
    allowed = rng.random((count, op.mask.shape[1] * 32)) < rng.choice([0.8, 1.1], (count, 1))
    allowed[:, : min(vocab, 3)] = True
    made["mask"] = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    banned = rng.integers(0, vocab, count)
    made["banned"] = np.where(rng.random(count) < 0.2, banned, -1).astype(np.int32)
    made["ids"] = rng.integers(0, vocab, count).astype(np.int32)
    if "q" in made:
        made["q"] = np.abs(made["q"])
    for s, first, end in rows.each():
        for row in range(first, end - 1):
            _propose(made, rng, s, row, row - first)


def _propose(made: Inputs, rng: np.random.Generator, s: int, row: int, index: int) -> None:
    """The draft behind `row`, often a good one, and what it was drawn from."""
    how = float(made["temperature"][s]), float(made["top_p"][s]), int(made["top_k"][s])
    logits, bias = made["logits"][row], (made["bias_ids"][s], made["bias"][s])
    if how[0] == 0:
        if rng.random() < 0.75:
            final = constrain(logits, made["mask"][row], *bias, int(made["banned"][row]))
            made["ids"][row + 1] = final.argmax()
        return
    close = (logits + 0.3 * rng.normal(size=logits.shape)).astype(np.float32)
    q = distribution(add_bias(close, *bias), *how)
    made["q"][made["slot"][row], index] = q
    made["ids"][row + 1] = rng.choice(len(q), p=q / q.sum())


def _draft_sample(op: Any, made: Inputs, rng: np.random.Generator, rows: Rows | None) -> None:
    sequences, vocab = op.markov.shape
    _asks(made, rng, sequences, vocab)
    made["logits"] = _spread(made["logits"], rng)
    if rng.random() < 0.5:
        made["markov"] = np.round(made["markov"])
    made["drafts"] = rng.integers(0, vocab, op.drafts.shape).astype(np.int32)


_SPECIAL: dict[str, Callable[[Any, Inputs, np.random.Generator, Rows | None], None]] = {
    "Linear": _linear,
    "Embed": _embed,
    "MarkovEmbed": _markov_embed,
    "EngramIds": _engram_ids,
    "EngramHash": _engram_hash,
    "EngramGather": _engram_gather,
    "ExpertRows": _expert_rows,
    "ExpertsUp": _experts,
    "ExpertsDown": _experts,
    "IndexScores": _index_scores,
    "SelectTopk": _scores,
    "CandidatePool": _scores,
    "Attention": _attention,
    "DraftRows": _draft_rows,
    "NextRows": _draft_rows,
    "FollowRows": _follow_rows,
    "LastIo": _last_io,
    "Accept": _accept,
    "DraftSample": _draft_sample,
}
