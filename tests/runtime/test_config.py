"""Switches, their errors, and the cache directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ultraflash.runtime.config import (
    BUNDLED_CHECKPOINT,
    SWITCHES,
    RuntimeConfig,
    gpu_numbers,
    prepare_cache_dir,
    switch_table,
)
from ultraflash.runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in SWITCHES:
        monkeypatch.delenv(switch.name, raising=False)


def test_defaults_run_the_bundled_checkpoint_on_what_there_is() -> None:
    config = RuntimeConfig.from_env()
    assert config == RuntimeConfig()
    assert config.checkpoint == BUNDLED_CHECKPOINT
    assert config.backend == "auto"


def test_the_bundled_checkpoint_is_small_enough_to_ship() -> None:
    files = [f for f in BUNDLED_CHECKPOINT.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 12_000_000


def test_switches_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UF_BACKEND", "numpy")
    monkeypatch.setenv("UF_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("UF_CHECK", "1")
    monkeypatch.setenv("UF_DUMP", "plan")
    config = RuntimeConfig.from_env(world=2)
    assert (config.backend, config.cache_dir, config.check) == ("numpy", tmp_path, True)
    assert config.dump == {"plan"}
    assert config.world == 2


def test_arguments_win_and_none_means_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UF_CHECK", "1")
    assert not RuntimeConfig.from_env(check=False).check
    assert RuntimeConfig.from_env(check=None).check


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("UF_BACKEND", "gpu", "UF_BACKEND=gpu is malformed: expected one of auto, numpy, cuda"),
        ("UF_CHECK", "yes", "UF_CHECK=yes is malformed: expected 0 or 1"),
        (
            "UF_PREFILL_CHUNKS",
            "16;128",
            "UF_PREFILL_CHUNKS=16;128 is malformed: expected row counts like 16,128",
        ),
        ("UF_STORE_BYTES", "1e9", "UF_STORE_BYTES=1e9 is malformed: expected a whole number"),
        (
            "UF_DUMP",
            "plan,paln",
            "UF_DUMP=plan,paln is malformed: expected words of plan, got paln",
        ),
    ],
)
def test_malformed_switches(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, complaint: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.from_env()
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"world": 0}, "world must be at least 1, got 0"),
        ({"max_sequences": -1}, "max_sequences must be at least 1, got -1"),
        ({"max_seq": 0}, "max_seq must be at least 1, got 0"),
        ({"tail": 0}, "tail must be at least 1, got 0"),
        ({"segment_tokens": 0}, "segment_tokens must be at least 1, got 0"),
        ({"store_bytes": -1}, "store_bytes must be at least 0"),
        ({"max_rows": 0}, "max_rows must be 1 to 16, got 0"),
        ({"max_rows": 17}, "max_rows must be 1 to 16, got 17"),
        ({"max_sequences": 9}, "max_sequences 9 is more than the 8 rows .* UF_MAX_ROWS"),
        ({"draft_block": 3}, r"draft_block must be 0 \(plain decoding\), 5, 6, 7, got 3"),
        ({"prefill_chunks": ()}, "prefill_chunks must be ascending positive row counts"),
        ({"prefill_chunks": (128, 16)}, r"got \(128, 16\)"),
        ({"attention_weights": "fp16"}, "attention_weights must be one of fp32, bf16, got 'fp16'"),
        ({"dump": frozenset({"x"})}, "cannot dump x"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RuntimeConfig(**settings)  # type: ignore[arg-type]


def test_every_gpu_that_is_named_is_a_rank_unless_a_world_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert RuntimeConfig.from_env(gpus=gpu_numbers("2,3")).world == 2
    assert RuntimeConfig.from_env(gpus=(0, 1), world=1).world == 1
    monkeypatch.setenv("UF_GPUS", "0,1,4,5")
    assert RuntimeConfig.from_env().world == 4
    assert RuntimeConfig.from_env(world=None).gpus == (0, 1, 4, 5)


def test_who_names_a_gpu_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RuntimeConfig.from_env().backend == "auto"
    assert RuntimeConfig.from_env(gpus=(0,)).backend == "cuda"
    monkeypatch.setenv("UF_GPUS", "1")
    assert RuntimeConfig.from_env(backend="auto").backend == "cuda"
    monkeypatch.setenv("UF_BACKEND", "numpy")
    assert RuntimeConfig.from_env().backend == "numpy"


def test_cache_directory_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert prepare_cache_dir(RuntimeConfig(cache_dir=folder)) == folder
    assert list(folder.iterdir()) == []


def test_unwritable_cache_directory(tmp_path: Path) -> None:
    # A file in the way fails for every user; permissions would not stop root.
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cache directory .*/file/x is not writable.*UF_CACHE_DIR"
    ):
        prepare_cache_dir(RuntimeConfig(cache_dir=tmp_path / "file" / "x"))


def test_a_full_cache_directory_may_be_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    config = RuntimeConfig(cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="not writable"):
        prepare_cache_dir(config)
    (tmp_path / "cubin").mkdir()
    assert prepare_cache_dir(config) == tmp_path
    with pytest.raises(ConfigError, match="not writable"):
        prepare_cache_dir(replace(config, dump=frozenset({"plan"})))


def test_table_lists_every_switch() -> None:
    text = switch_table({"UF_CHECK": "1"})
    assert [line.split()[0] for line in text.splitlines()[1:]] == [s.name for s in SWITCHES]
    assert "(default)" in text


def test_module_prints_the_table_and_names_a_bad_value() -> None:
    environment = dict(os.environ) | {"UF_CHECK": "maybe"}
    done = subprocess.run(
        [sys.executable, "-m", "ultraflash.runtime.config"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "UF_CACHE_DIR" in done.stdout
    assert "UF_CHECK=maybe is malformed: expected 0 or 1\n" in done.stderr
