"""Two servers may exchange caches exactly when every fact that decides a cache's bits is equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.checkpoints import edit_json, poke
from helpers.engines import greedy, open_engine, run
from helpers.rig import TINY
from ultraflash.runtime import Engine
from ultraflash.runtime.plans import Plans


def of(cache: Path, checkpoint: Path = TINY, **settings: Any) -> str:
    return open_engine(cache, checkpoint=checkpoint, **settings).fingerprint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "ckpt"))


def test_it_is_one_word(engine: Engine) -> None:
    assert len(engine.fingerprint) == 32
    int(engine.fingerprint, 16)


@pytest.mark.parametrize(
    "settings",
    [{}, {"check": True}, {"dump": frozenset({"plan"})}, {"backend": "numpy"}],
    ids=str,
)
def test_what_does_not_count(engine: Engine, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Watching an engine does not change it, nor does another cache directory."""
    assert of(tmp_path, **settings) == engine.fingerprint


def test_a_copy_of_the_checkpoint_is_the_same(engine: Engine, copy: Path, tmp_path: Path) -> None:
    assert of(tmp_path, copy) == engine.fingerprint


def test_serving_does_not_change_it(engine: Engine) -> None:
    before = engine.fingerprint
    run(engine, a=greedy(1, 20), b=greedy(2, 30))
    assert engine.fingerprint == before


@pytest.mark.parametrize(
    "settings",
    [{"max_seq": 95}, {"world": 2}, {"attention_weights": "bf16"}],
    ids=str,
)
def test_settings_that_count(engine: Engine, engine_cache: Path, settings: dict[str, Any]) -> None:
    assert of(engine_cache, **settings) != engine.fingerprint


def one_weight(folder: Path) -> None:
    poke(folder, "layers.5.attn.wkv.weight", 77, 0x31)


def tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def in_plan(folder: Path) -> None:
    edit_json(folder / "config.json", "text_config", "swiglu_limit", value=9.5)


def not_in_plan(folder: Path) -> None:
    """The plan holds a table's name, not the numbers that it is computed from."""
    edit_json(folder / "config.json", "text_config", "rope_theta", value=20000)


@pytest.mark.parametrize("change", [one_weight, tokenizer, in_plan, not_in_plan])
def test_files_that_count(
    engine: Engine, copy: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    change(copy)
    assert of(tmp_path, copy) != engine.fingerprint


def test_numpy_counts(engine: Engine, engine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "99.0")
    assert of(engine_cache) != engine.fingerprint


@pytest.mark.parametrize("part", ["blas", "simd"])
def test_blas_and_processor_count(
    engine: Engine, engine_cache: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """OpenBLAS sums in another order on another kind of processor."""
    built = deepcopy(np.show_config(mode="dicts"))
    if part == "blas":
        built["Build Dependencies"]["blas"]["version"] = "0.0"
    else:
        built["SIMD Extensions"]["found"] = ["X86_V3"]
    monkeypatch.setattr(np, "show_config", lambda mode: built)
    assert of(engine_cache) != engine.fingerprint


def test_plans_count(engine: Engine, engine_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of the same nodes is another step."""
    build = Plans._compile

    def swapped(self: Plans, plan):  # type: ignore[no-untyped-def]
        first, second, *rest = plan.nodes
        return build(self, replace(plan, nodes=(second, first, *rest)))

    monkeypatch.setattr(Plans, "_compile", swapped)
    assert of(engine_cache) != engine.fingerprint
