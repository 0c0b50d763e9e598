"""Drafting: proposals behind golden taps, stage by stage (model.md section 6).

Only one prompt's taps are there as a whole, and only its steps are held to the tight limits; for
the others the engine makes the prompt's taps itself and inherits the drift of a free run.
"""

from __future__ import annotations

from typing import Any

from ultraflash.tools.golden import limits, measure
from ultraflash.tools.golden.data import Tensors, ids_of
from ultraflash.tools.golden.run import Run


def check_draft(run: Run) -> None:
    """Taps of a prompt, then after each prompt: the first proposal and those of the next steps."""
    golden, report = run.golden.tensors("dspark"), run.report
    for prompt in sorted({int(key.split(".")[0][1:]) for key in golden}):
        name = f"P{prompt}"
        if not report.wants_any("dspark", [key for key in golden if key.startswith(f"{name}.")]):
            continue
        taps = run.probe.taps(run.golden.prompt(prompt))
        whole = golden.get(f"{name}.taps")
        if whole is not None:
            report.add(f"dspark {name}.taps", measure.relative(taps, whole, run.limits.logits))
        given = taps.copy() if whole is None else whole
        given[-1:] = golden[f"{name}.step0.tap"]
        _steps(run, golden, name, given, forced=whole is not None)


def _steps(run: Run, golden: Tensors, name: str, taps: Any, forced: bool) -> None:
    state, step = None, 0
    limit = run.limits.draft if forced else run.limits.free_draft
    experts = limits.DRAFT_EXPERT_ROWS if forced else limits.FREE_DRAFT_EXPERT_ROWS
    while f"{name}.step{step}.tokens" in golden:
        prefix = f"{name}.step{step}"
        want = ids_of(golden[f"{prefix}.tokens"])
        fed = taps if step == 0 else golden[f"{prefix}.tap"]
        got = run.probe.draft(state, fed, want[0])
        state = got["state"]
        got["main_x"] = got["main_x"][-1:]
        for key in sorted(k for k in golden if k.startswith(f"{prefix}.")):
            item = key.removeprefix(f"{prefix}.")
            if item in ("tokens", "tap", "position"):
                continue
            run.report.add(f"dspark {key}", _judge(golden, key, item, got, limit, experts))
        run.report.add(f"dspark {prefix}.tokens", measure.exact(got["tokens"], want))
        if step == 0:
            _rings(run, golden, name, got)
        step += 1


def _judge(
    golden: Tensors, key: str, item: str, got: dict[str, Any], limit: float, experts: float
) -> Any:
    stage = item.rpartition(".")[0]
    if item.endswith("expert_ids"):
        return measure.sets(got[item], golden[key], experts)
    if item.endswith("expert_w"):
        ids = golden[key.removesuffix("expert_w") + "expert_ids"]
        return measure.paired(got[f"{stage}.expert_ids"], got[item], ids, golden[key], limit)
    return measure.relative(got[item], golden[key], limit)


def _rings(run: Run, golden: Tensors, name: str, got: dict[str, Any]) -> None:
    for key in sorted(k for k in golden if k.startswith(f"{name}.ring_after_prefill.")):
        stage = key.rpartition(".")[2]
        limit = run.limits.forced["window_ring"] if f"{name}.taps" in golden else run.limits.logits
        run.report.add(f"dspark {key}", measure.relative(got[f"{stage}.ring"], golden[key], limit))
