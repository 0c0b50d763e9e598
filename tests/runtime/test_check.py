"""The two switches for looking in: UF_CHECK examines what nodes write, UF_DUMP writes plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.engines import alone, greedy, open_engine, run
from helpers.rig import TINY
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.ops.attention import Attention
from ultraflash.graphs.ops.gate import Gate
from ultraflash.graphs.ops.rms_norm import RmsNorm
from ultraflash.graphs.ops.take_last import TakeLast
from ultraflash.graphs.ops.window_kv import WindowKv
from ultraflash.graphs.plan import Op
from ultraflash.runtime import DeviceError, Engine, RuntimeConfig
from ultraflash.runtime.backend import Array


def with_nan(value: Array) -> Array:
    value = value.copy()
    value.reshape(-1)[-1] = np.nan
    return value


def not_bf16(value: Array) -> Array:
    return value + np.float32(1e-6)


def wide(value: Array) -> Array:
    return value.astype(np.float64)


def longer(value: Array) -> Array:
    return np.concatenate([value, value[:1]])


def flat(value: Array) -> Array:
    return value.reshape(-1)


def spoil(
    monkeypatch: pytest.MonkeyPatch, op: type[Op], how: Callable[[Array], Array], place: int = 0
) -> None:
    """One of the op's results is spoilt."""
    honest = op.reference  # type: ignore[attr-defined]

    def spoilt(*arguments: object) -> object:
        result = honest(*arguments)
        if not isinstance(result, tuple):
            return how(result)
        return tuple(how(v) if n == place else v for n, v in enumerate(result))

    monkeypatch.setattr(op, "reference", staticmethod(spoilt))


# op, how it goes wrong, which result, words: the first node of the kind, its buffer, what is wrong
WRONG = {
    "NaN": (RmsNorm, with_nan, 0, ["L0.attn.qr_q8 ", "L0.attn.qr_q8[", "NaN in 1 of"]),
    "not bf16": (RmsNorm, not_bf16, 0, ["L0.attn.qr_q8 ", "not bf16"]),
    "a wider type": (RmsNorm, wide, 0, ["L0.attn.qr_q8 ", "float64"]),
    "more rows": (Attention, longer, 0, ["L0.attn.attend ", "L0.attn.o[", "shape"]),
    "another shape": (Attention, flat, 0, ["L0.attn.attend ", "L0.attn.o[", "shape"]),
    "a second result": (Gate, with_nan, 1, ["L0.ffn.gate ", "L0.ffn.expert_w[", "NaN"]),
    "wide ids": (Gate, wide, 0, ["L0.ffn.gate ", "L0.ffn.expert_ids[", "float64"]),
    "codes": (WindowKv, wide, 0, ["L0.attn.window_kv ", "L0.attn.kv_codes[", "float64"]),
    "at the end": (TakeLast, with_nan, 0, ["last.", "NaN"]),
}


@pytest.mark.parametrize(("op", "how", "place", "words"), WRONG.values(), ids=WRONG)
def test_check_names_the_node(
    engine_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    op: type[Op],
    how: Callable[[Array], Array],
    place: int,
    words: list[str],
) -> None:
    spoil(monkeypatch, op, how, place)
    with pytest.raises(DeviceError) as caught:
        open_engine(engine_cache, check=True)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_check_looks_at_exchanges_too(engine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, AllReduce, with_nan)
    with pytest.raises(DeviceError, match=r"node L0\.attn_out wrote"):
        open_engine(engine_cache, check=True, world=2)


def test_check_changes_no_bit(engine: Engine, engine_cache: Path) -> None:
    request = greedy(1, 25, 6)
    for world in (1, 2):
        plain = engine if world == 1 else open_engine(engine_cache, world=world)
        watched = open_engine(engine_cache, check=True, world=world)
        assert alone(watched, request) == alone(plain, request)


def test_the_switches_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHECK", "1"), ("DUMP", "plan"), ("CACHE_DIR", str(tmp_path))):
        monkeypatch.setenv(f"UF_{name}", value)
    spoil(monkeypatch, RmsNorm, with_nan)
    with pytest.raises(DeviceError, match="NaN"):
        Engine.open(RuntimeConfig.from_env(checkpoint=TINY, max_seq=64))
    assert list(tmp_path.glob("*.plan"))


def test_dump_writes_every_plan_that_runs(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, dump=frozenset({"plan"}))
    names = {"prefill-rows4-sequences1-world1", "prefill-rows16-sequences1-world1"}
    names |= {"decode-rows1-sequences1-world1"}
    assert names <= {path.stem for path in tmp_path.glob("*.plan")}
    run(engine, a=greedy(1, 3, 9, ignore_eos=True), b=greedy(2, 3, 9, ignore_eos=True))
    files = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.plan")}
    for name, text in files.items():
        kind, rows = name.split("-")[:2]
        assert text.startswith(f"plan {kind} rows={rows.removeprefix('rows')} ")
    runners = engine._plans._runners.values()
    assert sorted(files.values()) == sorted(runner.plan.text() for runner in runners)
    assert any("-sequences2-" in name for name in files)


def test_nothing_is_dumped_unasked(tmp_path: Path) -> None:
    open_engine(tmp_path)
    assert not list(tmp_path.glob("*.plan"))


def test_trace_writes_a_line_for_every_step(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, trace=tmp_path / "steps.jsonl")
    run(engine, a=greedy(1, 3, 5, ignore_eos=True))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["plan"] for line in lines[:2]] == ["prefill", "decode"]  # the warm-up
    assert all(line["ms"] > 0 and line["rows"] <= line["plan_rows"] for line in lines)
    decoded = [line for line in lines[2:] if line["plan"] == "decode"]
    assert sum(1 + line["accepted"][0] for line in decoded) >= 4
