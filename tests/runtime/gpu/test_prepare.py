"""An engine on a GPU has compiled, placed and captured all plans before it is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda, Gpu
from helpers.rig import TINY
from ultraflash.runtime import Engine, RuntimeConfig
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu import nvrtc
from ultraflash.runtime.gpu.runner import CudaRunner

pytestmark = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())


@pytest.fixture
def config(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeConfig:
    """Two sequences, three rows, chunks of 4; without a warm-up, for kernels do nothing here."""
    monkeypatch.setattr(Engine, "_warm_up", lambda engine: None)
    return RuntimeConfig(TINY, "cuda", max_sequences=2, max_rows=3, prefill_chunks=(4, 64),
                         max_seq=64, cache_dir=kernel_cache)  # fmt: skip


def test_no_step_compiles_allocates_or_captures(
    cuda: FakeCuda, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(config)
    assert cuda.graph_launches == 0
    used = cuda.used_bytes
    monkeypatch.setattr(nvrtc, "compile_unit", lambda *_: pytest.fail("compiled late"))
    monkeypatch.setattr(CudaRunner, "_capture", lambda *_: pytest.fail("captured late"))
    plans, wanted = engine._plans, 0
    for runner in [
        *(plans.decode_runner(rows, s) for rows in (1, 2, 3) for s in (1, 2) if s <= rows),
        *(plans.prefill_runner(rows, ends) for rows in (4, 64) for ends in (False, True)),
    ]:
        for place in (0, 1):
            runner.launch(place)
            runner.wait(place)
            wanted += 1
    assert cuda.graph_launches == wanted
    assert cuda.used_bytes == used
    assert len(plans._runners) == 9, "and nothing that is never used"


@pytest.mark.parametrize("mode", ["ced20", "ced21"])
def test_plans_of_encoded_prompts(cuda: FakeCuda, config: RuntimeConfig, mode: str) -> None:
    settings = {"prefill": mode, "max_sequences": 1, "max_rows": 1, "prefill_chunks": (4,)}
    plans = Engine.open(replace(config, **settings))._plans  # type: ignore[arg-type]
    used = cuda.used_bytes
    names = [plans.encode_runner(4).plan.name, plans.replay_runner().plan.name]
    assert names == [f"encode_{mode}", f"replay_{mode}"]
    assert (cuda.used_bytes, len(plans._runners)) == (used, 5)


def test_a_lack_of_memory_is_told_at_the_start(cuda: FakeCuda, config: RuntimeConfig) -> None:
    """Of the plan that only a long prompt uses."""
    config = replace(config, max_sequences=1, max_rows=1, prefill_chunks=(64,), draft_block=0)
    runner = Engine.open(config)._plans.prefill_runner(64, ends=False)
    missing = runner.arena.size  # type: ignore[attr-defined]
    cuda.gpus = (Gpu(total_bytes=cuda.used_bytes - missing),)
    cuda.allocated.clear()
    with pytest.raises(DeviceError, match=r"^scratch of prefill_part needs \S+ GiB of GPU memory"):
        Engine.open(config)


def test_all_ranks_of_a_group(cuda: FakeCuda, config: RuntimeConfig) -> None:
    cuda.gpus = Gpu(), Gpu()
    settings = {"world": 2, "gpus": (0, 1), "max_sequences": 1, "max_rows": 1, "draft_block": 0}
    plans = Engine.open(replace(config, **settings))._plans  # type: ignore[arg-type]
    assert cuda.graph_launches == 0
    assert len(plans._runners) == 5
    assert all(runner.nodes > 0 for runner in plans._runners.values())  # type: ignore[attr-defined]


def test_eager_engines_capture_nothing(cuda: FakeCuda, config: RuntimeConfig) -> None:
    config = replace(config, eager=True, max_sequences=1, max_rows=1, draft_block=0)
    plans = Engine.open(config)._plans
    assert len(plans._runners) == 5
    assert not any(runner.nodes for runner in plans._runners.values())  # type: ignore[attr-defined]
