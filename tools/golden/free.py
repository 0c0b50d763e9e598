"""Net 3: the model running freely. Gross mistakes only; see tests/golden/README.md for why.

Also here: what the engine promises about itself on the same runs, that a row's bits do not depend
on how a sequence was cut.
"""

from __future__ import annotations

import math
from itertools import cycle

import numpy as np

from ultraflash.tools.golden import limits, measure
from ultraflash.tools.golden.data import Array, ids_of
from ultraflash.tools.golden.limits import Limits
from ultraflash.tools.golden.measure import Verdict
from ultraflash.tools.golden.run import Run

_VARIANTS = ("f32idx", "official")


def check_logits(run: Run) -> None:
    """Prefill, one token at a time, and in chunks of odd sizes, for every prompt."""
    for prompt in run.golden.prompts:
        names = [
            f"logits {v}.{kind}.P{prompt}" for v in _VARIANTS for kind in ("prefill", "decode")
        ]
        names += [f"logits {kind}.P{prompt}" for kind in ("verbatim.decode", "chunks", "same_bits")]
        if any(run.report.wants(name) for name in names):
            _logits_of(run, prompt)


def _logits_of(run: Run, prompt: int) -> None:
    golden, probe, report = run.golden.tensors("logits"), run.probe, run.report
    ids, fed = run.golden.prompt(prompt), run.golden.decode(prompt)
    state, first = probe.prefill(ids)
    steps = np.concatenate([probe.extend(state, [token]) for token in fed])
    overall = run.limits.short_logits if prompt <= limits.SHORT_PROMPT else run.limits.logits
    for variant in _VARIANTS:
        report.add(
            f"logits {variant}.prefill.P{prompt}",
            judge_logits(first, golden[f"{variant}.prefill.P{prompt}"], overall, run.limits),
        )
        # Not `overall`: after a prompt of two the reference itself differs by 0.055 from one
        # prefill.
        report.add(
            f"logits {variant}.decode.P{prompt}",
            judge_logits(
                steps, golden[f"{variant}.decode.P{prompt}"], run.limits.logits, run.limits
            ),
        )
    wanted = golden[f"f32idx.decode.P{prompt}"]
    report.add(
        f"logits verbatim.decode.P{prompt}",
        _not_verbatim(steps, wanted, golden[f"verbatim.decode.P{prompt}"]),
    )
    chunks = _in_chunks(run, ids + fed)
    whole = np.concatenate([golden[f"f32idx.prefill.P{prompt}"], wanted])
    report.add(
        f"logits chunks.P{prompt}", judge_logits(chunks, whole, run.limits.logits, run.limits)
    )
    report.add(f"logits same_bits.P{prompt}", measure.exact(chunks, np.concatenate([first, steps])))


def _in_chunks(run: Run, ids: list[int]) -> Array:
    """One sequence in chunks whose edges fall at odd and even places, inside and across windows."""
    window = run.golden.model.window
    sizes = cycle((1, 2, window - 1, 7, window + 4, 1, 14, 3, 2 * window + 9))
    state, logits = None, []
    done = 0
    while done < len(ids):
        part = ids[done : done + next(sizes)]
        if state is None:
            state, rows = run.probe.prefill(part)
        else:
            rows = run.probe.extend(state, part)
        logits.append(rows)
        done += len(part)
    return np.concatenate(logits)


def judge_logits(got: Array, want: Array, overall: float, allowed: Limits) -> Verdict:
    """The whole array, quartile and median of its rows, the argmax where its margin is clear.

    A flipped choice spoils single rows, a systematic mistake moves them all: hence the quantiles.
    """
    bad = measure.misshapen(got, want)
    if bad:
        return bad
    rows = [measure.relative_rms(a, b) for a, b in zip(got, want, strict=True)]
    quartile, median = np.quantile(rows, [0.25, 0.5])
    room = limits.FEW_ROWS_FACTOR if len(rows) < limits.FEW_ROWS else 1.0
    best = np.sort(want, axis=-1)
    clear = best[:, -1] - best[:, -2] > limits.CLEAR_MARGIN
    wrong = int((clear & (got.argmax(-1) != want.argmax(-1))).sum())
    error = measure.relative_rms(got, want)
    ok = (
        error <= overall
        and quartile <= room * allowed.row_quartile
        and median <= room * allowed.row_median
        and wrong <= math.floor(allowed.clear_rows_wrong * int(clear.sum()))
    )
    note = (
        f"rows: quartile {quartile:.3f} <= {room * allowed.row_quartile:.3f}, "
        f"median {median:.3f} <= {room * allowed.row_median:.3f}; "
        f"clear argmax wrong {wrong} of {int(clear.sum())}"
    )
    return Verdict(ok, error, overall, note)


def _not_verbatim(got: Array, wanted: Array, verbatim: Array) -> Verdict:
    """The engine must be nearer to own-keys decoding than to the release's stale keys."""
    if np.array_equal(wanted, verbatim):
        return measure.within(0.0, 1.0, "the release's stale index keys change nothing here")
    right, stale = measure.relative_rms(got, wanted), measure.relative_rms(got, verbatim)
    return measure.within(
        right / max(stale, 1e-30),
        1.0,
        "distance to own-keys decoding / to the release's stale keys",
    )


def check_greedy(run: Run) -> None:
    """The golden greedy tokens fed one by one, and in one prefill."""
    golden = run.golden.tensors("greedy")
    for prompt in run.golden.prompts:
        keys = [key for key in golden if key.startswith(f"P{prompt}.")]
        if not run.report.wants_any("greedy", keys):
            continue
        ids, follow = run.golden.prompt(prompt), ids_of(golden[f"P{prompt}.ids"])
        state, logits = run.probe.prefill(ids)
        steps = [logits[-1:]] + [run.probe.extend(state, [token]) for token in follow[:-1]]
        _, prefill = run.probe.prefill(ids + follow[:-1])
        for variant in _VARIANTS:
            _greedy(run, f"P{prompt}.{variant}", np.concatenate(steps), prefill[prompt - 1 :])


def _greedy(run: Run, prefix: str, steps: Array, prefill: Array) -> None:
    golden = run.golden.tensors("greedy")
    for ending, logits in (("", steps), ("_as_prefill", prefill)):
        want = golden[f"{prefix}.argmax{ending}"]
        clear = golden[f"{prefix}.margin{ending}"] > limits.CLEAR_MARGIN
        same = logits.argmax(-1) == want
        note = f"clear steps wrong, of {int(clear.sum())}; {int(same.sum())} of {len(want)} equal"
        run.report.add(
            f"greedy {prefix}.argmax{ending}", measure.within(int((clear & ~same).sum()), 0, note)
        )
    top = golden[f"{prefix}.ids_top8"]
    run.report.add(
        f"greedy {prefix}.logits_top8",
        measure.relative(
            np.take_along_axis(steps, top.astype(np.int64), 1),
            golden[f"{prefix}.logits_top8"],
            run.limits.logits,
        ),
    )


def check_decisions(run: Run) -> None:
    """Experts, selections, pools of a free prefill: near ties may differ, clear choices not."""
    golden = run.golden.tensors("decisions")
    gaps: dict[str, float] = {}
    for prompt in run.golden.prompts:
        keys = sorted(key for key in golden if key.startswith(f"P{prompt}."))
        if not run.report.wants_any("decisions", keys):
            continue
        found = run.probe.trace(run.golden.prompt(prompt))
        for key in keys:
            name = key.removeprefix(f"P{prompt}.")
            if key.endswith("_gap"):
                continue
            if name not in found:
                run.report.fail(f"decisions {key}", f"the engine returned no {name}")
            elif name == "pool":
                run.report.add(f"decisions {key}", _pool(run, found[name], golden[key]))
            else:
                gap = name.replace("expert_ids", "expert_gap").replace("sel", "sel_gap")
                if gap not in gaps:
                    gaps[gap] = _median_gap(run, gap)
                clear = golden[f"P{prompt}.{gap}"] > gaps[gap]
                run.report.add(
                    f"decisions {key}", _choices(run.limits, found[name], golden[key], clear)
                )


def _median_gap(run: Run, gap: str) -> float:
    """Median over all prompts of a layer's finite gaps."""
    golden = run.golden.tensors("decisions")
    values = np.concatenate(
        [golden[key] for p in run.golden.prompts if (key := f"P{p}.{gap}") in golden]
    )
    values = values[np.isfinite(values)]
    return float(np.quantile(values, limits.CLEAR_GAP_QUANTILE)) if len(values) else 0.0


def _choices(allowed: Limits, got: Array, want: Array, clear: Array) -> Verdict:
    """Rows with another set: few of those with a clear gap, and not too many of all."""
    other = measure.rows_with_other_sets(got, want)
    wrong, differ = int((other & clear).sum()), int(other.sum())
    limit = math.floor(allowed.clear_choices_wrong * int(clear.sum()))
    most = math.floor(allowed.choices_wrong * len(want))
    note = f"clear rows differ, of {int(clear.sum())}; of all {len(want)}: {differ} <= {most}"
    return Verdict(wrong <= limit and differ <= most, wrong, limit, note)


def _pool(run: Run, got: Array, want: Array) -> Verdict:
    """Pools as reachable positions; rows whose blocks all fit into the pool must be equal."""
    model = run.golden.model
    bad = measure.misshapen(got, want)
    if bad:
        return bad
    ratio = max(1, model.ratio(model.candidate_source))
    reach = (np.arange(len(want)) + 1) // ratio
    reachable = np.arange(want.shape[1]) < reach[:, None]
    other = (((got != 0) ^ (want != 0)) & reachable).any(axis=1)
    whole = reach <= model.candidate_blocks * model.candidate_block_size
    limit = math.floor(run.limits.pool_rows * int((~whole).sum()))
    error = int(other.sum()) if not (other & whole).any() else math.inf
    return measure.within(error, limit, f"rows that differ, of {int((~whole).sum())} that are cut")


def check_caches(run: Run) -> None:
    """Caches after a free prefill. The first layer's have nothing to drift with."""
    for stem in run.golden.stems("caches_"):
        golden = run.golden.tensors(stem)
        for prompt in run.golden.prompts:
            keys = sorted(key for key in golden if key.startswith(f"P{prompt}."))
            if not run.report.wants_any(stem, keys):
                continue
            state, _ = run.probe.prefill(run.golden.prompt(prompt))
            found = run.probe.caches(state)
            for key in keys:
                name = key.removeprefix(f"P{prompt}.")
                layer, kind = name.removeprefix("L").split(".")
                if name not in found:
                    run.report.fail(f"{stem} {key}", f"the engine returned no {name}")
                    continue
                limit = run.limits.forced[kind] if layer == "0" else run.limits.free_caches
                run.report.add(f"{stem} {key}", measure.relative(found[name], golden[key], limit))
