"""Contents of buffers for timing: of every operation, ones that its reference can work with."""

from __future__ import annotations

import warnings
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np
import pytest

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.numerics import bf16_from_bits
from ultraflash.graphs.ops.accept import Accept
from ultraflash.graphs.plan import Life, Op, Ref
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.weights.formats import dequantise
from ultraflash.runtime.weights.layout import stored_sizes
from ultraflash.runtime.weights.load import MappedRows
from ultraflash.tools.op_cases import Case, cases
from ultraflash.tools.op_data import PATTERN, Setting, contents

SETTING = Setting(context=512)


def tiny_cases() -> list[Case]:
    build = Build(Model.from_checkpoint(BUNDLED_CHECKPOINT), Capacity(1, 512), block=5)
    return [case for rows in (1, 8) for case in cases(build_decode(build, rows, 1), "all")]


def repeated(values: np.ndarray, size: int) -> np.ndarray:
    """A beginning, repeated to so many bytes as a device would have it."""
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return np.resize(raw, size)


def as_reference(ref: Ref, made: tuple[np.ndarray, ...]) -> Any:
    """A buffer as the reference operations see it."""
    codes, *scales = (repeated(a, size) for a, size in zip(made, stored_sizes(ref), strict=True))
    rows, columns = (1, *ref.shape)[-2:]
    if ref.dtype == "rows8":
        return MappedRows(codes.reshape(ref.shape), scales[0].reshape(rows, -1))
    if ref.dtype in ("fp8", "fp4"):
        packed = codes.reshape(*ref.shape[:-1], columns // (2 if ref.dtype == "fp4" else 1))
        step = 32 if ref.dtype == "fp8" else 1
        shape = (*ref.shape[:-2], -(-rows // step), -(-columns // 32))
        return dequantise(ref.dtype, packed, scales[0].reshape(shape)).astype(np.float64)
    if ref.dtype == "bf16":
        value = bf16_from_bits(codes.view(np.uint16))[: prod(ref.shape)].reshape(ref.shape)
    else:
        value = codes.view(
            {
                "f32": np.float32,
                "i32": np.int32,
                "u32": np.uint32,
                "i64": np.int64,
                "u64": np.uint64,
                "u8": np.uint8,
            }[ref.dtype]
        )
        value = value.reshape(ref.shape)
    matrix = ref.life is Life.WEIGHT and len(ref.shape) > 1 and ref.dtype in ("bf16", "f32")
    return value.astype(np.float64) if matrix else value


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda c: f"{c.op.stem()} {c.label}")
def test_a_reference_works_on_them_without_a_warning(case: Case, rng: np.random.Generator) -> None:
    """No index out of range, no NaN: what a kernel would read, and so how long it takes."""
    op = case.op
    arguments: list[Any] = []
    known: dict[str, Any] = {}
    for f in fields(op):
        value = getattr(op, f.name)
        if f.name in op.OUT:
            continue
        if isinstance(value, Ref):
            made = contents(op, f.name, value, SETTING, rng, known)
            known[f.name], value = made[0], as_reference(value, made)
        arguments.append(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = type(op).reference(*arguments)  # type: ignore[attr-defined]
    for result in results if isinstance(results, tuple) else (results,):
        if result is not None and result.dtype.kind == "f":
            assert not np.isnan(result).any()


def test_verification_looks_at_every_row(release: dict[str, Op]) -> None:
    """A speed of rows that a wrong draft ends would be none of verification."""
    op = next(op for op in release.values() if isinstance(op, Accept))
    rng, known = np.random.default_rng(0), dict[str, Any]()
    for name in ("logits", "ids"):
        known[name] = contents(op, name, getattr(op, name), SETTING, rng, known)[0]
    logits = np.resize(known["logits"], op.logits.shape)
    assert (known["ids"][1:] == logits.argmax(axis=1)[:-1]).all()


def of(op: Op, name: str, seed: int = 0, setting: Setting = SETTING) -> np.ndarray:
    ref = dict(op.refs)[name]
    return contents(op, name, ref, setting, np.random.default_rng(seed))[0].reshape(ref.shape)


@pytest.fixture(scope="module")
def release() -> dict[str, Op]:
    plan = build_decode(Build(release_model(), Capacity(1, 65_536), block=5), 8, 1)
    return {f"{c.op.stem()} {c.label}": c.op for c in cases(plan, "all")}


def test_experts_are_spread_and_ascend(release: dict[str, Op]) -> None:
    op = release["experts_up L0.ffn.up"]
    ids = of(op, "ids")
    assert (np.diff(ids, axis=1) > 0).all()
    assert 0 <= ids.min() < 60
    assert 320 < ids.max() < 384
    assert len(np.unique(ids)) > 38, "as many different ones as random routing has"
    assert (ids != of(op, "ids", seed=1)).any(), "another launch, other experts"


def test_selections_reach_over_the_whole_context(release: dict[str, Op]) -> None:
    setting = Setting(65_536)
    sel = of(release["attention L20.attn.attend"], "sel", setting=setting)
    assert (np.diff(sel, axis=1) > 0).all()
    assert (sel.min() >= 0, sel.max() > 60_000, sel.max() < 65_536) == (True, True, True)
    pool = of(release["select_topk L24.attn.select"], "pool", setting=setting)
    assert (pool[:, -1] == 65_536 // 8 - 1).all(), "the newest block is in every pool"
    assert (np.diff(pool, axis=1) > 0).all()
    position = of(release["attention L20.attn.attend"], "position", setting=setting)
    assert position.tolist() == list(range(65_528, 65_536))


def test_a_long_buffer_is_given_by_its_beginning(release: dict[str, Op]) -> None:
    op = release["experts_up L0.ffn.up"]
    w1 = dict(op.refs)["w1"]
    made = contents(op, "w1", w1, SETTING, np.random.default_rng(0))
    assert stored_sizes(w1) == (384 * 2304 * 2560, 384 * 2304 * 160)
    assert sum(stored_sizes(w1)) == w1.nbytes
    assert [a.nbytes for a in made] == [PATTERN // 2, PATTERN // 32]
    assert len(np.unique(made[0])) > 200
    assert 100 < made[1].mean() < 127, "scales that weights of this size have"


def test_sizes_of_what_is_stored(release: dict[str, Op]) -> None:
    for op in release.values():
        for _, ref in op.refs:
            assert sum(stored_sizes(ref)) == ref.nbytes, ref  # no padding: whole tiles
            assert len(stored_sizes(ref)) == 1 + (ref.dtype in ("fp8", "fp4", "rows8"))
            assert stored_sizes(ref)[0] >= prod(ref.shape) // 2


def test_how_tokens_are_drawn_is_the_settings() -> None:
    op = next(case.op for case in tiny_cases() if case.op.stem() == "draft_sample")
    setting = Setting(512, temperature=0.5, top_p=0.75, top_k=9)
    assert of(op, "temperature", setting=setting).tolist() == [0.5]
    assert of(op, "top_p", setting=setting).tolist() == [0.75]
    assert of(op, "top_k", setting=setting).tolist() == [9]
