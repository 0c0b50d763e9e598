"""The comparer itself: a perfect engine passes, a wrong one nowhere, bad folders say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.fake_probe import FakeProbe
from ultraflash.tools import check_golden
from ultraflash.tools.golden.data import Golden
from ultraflash.tools.golden.report import Report

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.open(TINY)


def compared(golden: Golden, probe: Any, only: str = "") -> Report:
    report = Report(lambda line: None, only)
    check_golden.compare(golden, probe, report)
    return report


def names(report: Report, status: str) -> set[str]:
    return {item.name for item in report.items if item.status == status}


def test_perfect_engine_passes(golden: Golden) -> None:
    report = compared(golden, FakeProbe(golden))
    assert names(report, "FAIL") == set()
    assert {name.split()[0] for name in names(report, "SKIP")} == {
        "dspark",
        "resize_plans",
        "vision",
    }


def test_no_golden_tensor_is_left_out(golden: Golden) -> None:
    """Every golden tensor but inputs and gaps is named by an item."""
    items = {item.name for item in compared(golden, FakeProbe(golden)).items}
    for stem in (*golden.stems("layers_"), *golden.stems("caches_"), "decisions", "logits"):
        keys = {k for k in golden.tensors(stem) if not k.endswith("_gap") and "verbatim" not in k}
        assert {key for key in keys if f"{stem} {key}" not in items} == set(), stem


def test_wrong_engine_passes_nowhere(golden: Golden) -> None:
    """No item is vacuous: when every array that leaves the engine is noise, every item fails."""
    rng = np.random.default_rng(7)

    def noise(array: Array) -> Array:
        if array.dtype.kind == "f":
            return (array * rng.normal(size=array.shape) - 1).astype(np.float32)
        if array.max(initial=0) <= 1:
            return 1 - array
        return array + rng.integers(3, 9, size=array.shape)

    report = compared(golden, FakeProbe(golden, noise))
    # Not through the probe; judged by a ratio that noise may win; the empty string.
    exempt = ("chat ", "logits verbatim", "tokenizer plain.0")
    assert {n for n in names(report, "PASS") if not n.startswith(exempt)} == set()


@pytest.mark.parametrize(
    ("method", "name", "item"),
    [
        ("forced_layer", "attn_out", "layers_f32idx_P33 prefill.L3.attn_out"),
        ("forced_layer", "X", "layers_official_P33 prefill.L0.X"),
        ("forced_layer", "pre", "layers_f32idx_P33 decode1.L9.pre"),
        ("forced_head", "head_in", "layers_f32idx_P100 prefill.head_in"),
        ("caches", "L2.main_kv", "layers_f32idx_P33 cache_after.L2.main_kv"),
    ],
)
def test_two_per_cent_are_noticed(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, method: str, name: str, item: str
) -> None:
    right = getattr(FakeProbe, method)

    def wrong(*args: Any) -> dict[str, Array]:
        found: dict[str, Array] = right(*args)
        return {k: v * np.float32(1.02) if k == name else v for k, v in found.items()}

    monkeypatch.setattr(FakeProbe, method, wrong)
    assert item in names(compared(golden, FakeProbe(golden), item), "FAIL")


def test_missing_method_is_a_skip_with_its_name(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeProbe, "gate")
    report = compared(golden, FakeProbe(golden))
    assert ("gate", "SKIP", "the engine offers no gate") in {
        (item.name, item.status, item.text) for item in report.items
    }


def test_missing_array_is_a_failure(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProbe, "trace", lambda self, ids: {})
    assert names(compared(golden, FakeProbe(golden), "P2.L0.expert_ids"), "FAIL") == {
        "decisions P2.L0.expert_ids"
    }


def test_only_restricts_the_work(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for expensive in ("prefill", "prompt", "begin", "trace"):
        monkeypatch.setattr(FakeProbe, expensive, lambda *args: pytest.fail("was not asked for"))
    report = compared(golden, FakeProbe(golden), "rope tiny_plain.freq")
    assert [item.name for item in report.items] == ["rope tiny_plain.freq"]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda folder: folder.rename(folder.with_name("gone")), "is not a folder"),
        (lambda folder: (folder / "expected" / "meta.json").unlink(), "cannot be read"),
        (lambda folder: (folder / "expected" / "meta.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "expected" / "meta.json").write_text("{}"), "prompt_lengths"),
        (lambda folder: (folder / "ckpt" / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "expected" / "prompts.safetensors").write_bytes(b"x"), "damaged"),
    ],
)
def test_unusable_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], break_it: Any, says: str
) -> None:
    folder = tmp_path / "golden"
    for part in ("ckpt/config.json", "expected/meta.json", "expected/prompts.safetensors"):
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).write_bytes((TINY / part).read_bytes())
    break_it(folder)
    assert check_golden.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
