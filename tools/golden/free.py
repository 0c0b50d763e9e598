"""Net 3: the model running freely. Gross mistakes only; see tests/golden/README.md for why.

Also here: what the engine promises about itself on the same runs, that a row's bits do not depend
on how a sequence was cut.
"""

from __future__ import annotations

import math
from itertools import cycle, product

import numpy as np

from ultraflash.tools.golden import limits, measure
from ultraflash.tools.golden.data import Array, Tensors, ids_of
from ultraflash.tools.golden.limits import Limits
from ultraflash.tools.golden.measure import Verdict
from ultraflash.tools.golden.run import Run

_OURS = "f32idx"
_CHUNKS = (16, 128)  # rows
_VARIANTS = (_OURS, "official")
_VERBATIM = "logits verbatim.decode"


def check_logits(run: Run) -> None:
    """Prefill, one token at a time, and in chunks of odd sizes, for every prompt."""
    stale = run.report.wants(_VERBATIM)
    steps: dict[int, Array] = {}
    for prompt in run.golden.prompts:
        names = [
            f"logits {v}.{kind}.P{prompt}" for v in _VARIANTS for kind in ("prefill", "decode")
        ]
        names += [f"logits {kind}.P{prompt}" for kind in ("chunks", "same_bits")]
        if stale or any(run.report.wants(name) for name in names):
            steps[prompt] = _logits_of(run, prompt)
    if stale:
        run.report.add(_VERBATIM, _towards_verbatim(run, steps))


def _logits_of(run: Run, prompt: int) -> Array:
    """Judge one prompt; returns the logits of its decode steps."""
    golden, probe, report = run.golden.tensors("logits"), run.probe, run.report
    ids, fed = run.golden.prompt(prompt), run.golden.decode(prompt)
    state, first = probe.prefill(ids)
    steps = np.concatenate([probe.extend(state, [token]) for token in fed])
    overall = run.limits.short_logits if prompt <= limits.SHORT_PROMPT else run.limits.logits
    for variant in _VARIANTS:
        room = 1.0 if variant == _OURS else limits.OTHER_INDEX_ROUNDING
        # Steps are never held to the limit of short prompts: after a prompt of two, the reference's
        # own steps differ from its prefill by 0.055.
        for kind, got, limit in (
            ("prefill", first, overall),
            ("decode", steps, run.limits.logits),
        ):
            key = f"{variant}.{kind}.P{prompt}"
            report.add(f"logits {key}", judge_logits(got, golden[key], limit, run.limits, room))
    chunks = _in_chunks(run, ids + fed)
    whole = np.concatenate([golden[f"{_OURS}.{kind}.P{prompt}"] for kind in ("prefill", "decode")])
    report.add(
        f"logits chunks.P{prompt}", judge_logits(chunks, whole, run.limits.logits, run.limits)
    )
    report.add(f"logits same_bits.P{prompt}", measure.exact(chunks, np.concatenate([first, steps])))
    return steps


def check_prompts(run: Run) -> None:
    """Prompts through the plans of chunks, whose last one is hardly ever full: what comes behind
    the last row, and that nothing differs from a prefill in one piece.
    """
    for chunk, prompt in product(_CHUNKS, run.golden.prompts):
        name = f"chunk{chunk}.P{prompt}"
        if any(run.report.wants(f"prompts {kind}.{name}") for kind in ("logits", "same_bits")):
            _prompt(run, chunk, prompt, name)


def _prompt(run: Run, chunk: int, prompt: int, name: str) -> None:
    ids, probe = run.golden.prompt(prompt), run.probe
    golden = run.golden.tensors("logits")[f"{_OURS}.prefill.P{prompt}"]
    state, logits = probe.prompt(ids, chunk)
    limit = run.limits.short_logits if prompt <= limits.SHORT_PROMPT else run.limits.logits
    limit *= limits.FEW_ROWS_FACTOR  # it is meant for the rows of a whole prompt, here is one
    report = run.report
    report.add(f"prompts logits.{name}", measure.relative(logits, golden[-1:], limit))
    whole, rows = probe.prefill(ids)
    got, want = _behind(logits, probe.caches(state)), _behind(rows, probe.caches(whole))
    report.add(f"prompts same_bits.{name}", measure.exact(got, want))


def _behind(logits: Array, caches: dict[str, Array]) -> Array:
    """Everything that a prompt leaves, in one row: logits of its last position, caches."""
    return np.concatenate([logits[-1], *(caches[name].ravel() for name in sorted(caches))])


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


def judge_logits(
    got: Array, want: Array, overall: float, allowed: Limits, room: float = 1.0
) -> Verdict:
    """The whole array, quartile and median of its rows, the argmax where its margin is clear.

    A flipped choice spoils single rows, a systematic mistake moves them all: hence the quantiles.
    """
    bad = measure.misshapen(got, want)
    if bad:
        return bad
    rows = [measure.relative_rms(a, b) for a, b in zip(got, want, strict=True)]
    quartile, median = np.quantile(rows, [0.25, 0.5])
    if len(rows) < limits.FEW_ROWS:
        room *= limits.FEW_ROWS_FACTOR
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


def _towards_verbatim(run: Run, steps: dict[int, Array]) -> Verdict:
    """How far the steps go from own-keys decoding to the release's stale index keys: 1 all the way.

    Projected on that direction drift counts little, but not nothing, since the golden runs drift
    too: hence over all prompts together, and from the mean of the two runs with own keys.
    """
    golden = run.golden.tensors("logits")
    along = length = 0.0
    for prompt, got in steps.items():
        own = np.mean(
            [golden[f"{v}.decode.P{prompt}"] for v in _VARIANTS], axis=0, dtype=np.float64
        )
        away = golden[f"verbatim.decode.P{prompt}"] - own
        if got.shape == own.shape:
            along += float(((got - own) * away).sum())
            length += float(np.square(away).sum())
    share = along / length if length else 0.0
    return measure.within(share, limits.STALE, "of the way to the release's stale index keys")


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
                run.report.add(f"decisions {key}", _choices(run, prompt, name, found[name]))


def _choices(run: Run, prompt: int, name: str, got: Array) -> Verdict:
    """The share of golden choices that were not made, over rows with a clear gap and over all.

    One choice may always differ: the rows of a short prompt would have no room for any.
    """
    golden = run.golden.tensors("decisions")
    kind = "experts" if name.endswith("expert_ids") else "selected"
    gap = name.replace("expert_ids", "expert_gap").replace("sel", "sel_gap")
    want = golden[f"P{prompt}.{name}"]
    gaps = golden[f"P{prompt}.{gap}"]
    clear = gaps > _median_gap(run, gap)
    rows = measure.missed(got, want)
    error = float(rows[clear].mean()) if clear.any() else 0.0
    overall = float(rows.mean())
    limit = max(run.limits.clear_missed[kind], 1 / max(1, int(clear.sum()) * want.shape[1]))
    most = max(run.limits.missed[kind], 1 / want.size)
    note = (
        f"missed in {int(clear.sum())} clear rows; in all {len(want)}: {overall:.3f} <= {most:.3f}"
    )
    no_choice = np.isinf(gaps)  # everything is selected: nothing to be near
    ok = error <= limit and overall <= most and not rows[no_choice].any()
    return Verdict(ok, error, limit, note)


def _median_gap(run: Run, gap: str) -> float:
    """Median over all prompts of a layer's finite gaps."""
    golden = run.golden.tensors("decisions")
    values = np.concatenate(
        [golden[key] for p in run.golden.prompts if (key := f"P{p}.{gap}") in golden]
    )
    values = values[np.isfinite(values)]
    return float(np.quantile(values, limits.CLEAR_GAP_QUANTILE)) if len(values) else 0.0


def _pool(run: Run, got: Array, want: Array) -> Verdict:
    """The share of pooled positions that is missing, over rows whose blocks do not all fit.

    Where they fit, every reachable position must be there.
    """
    model = run.golden.model
    bad = measure.misshapen(got, want)
    if bad:
        return bad
    reach = (np.arange(len(want)) + 1) // max(1, model.ratio(model.candidate_source))
    reachable = np.arange(want.shape[1]) < reach[:, None]
    theirs = (want != 0) & reachable
    lost = (theirs & (got == 0)).sum(axis=1) / np.maximum(1, theirs.sum(axis=1))
    cut = reach > model.candidate_blocks * model.candidate_block_size
    error = float(lost[cut].mean()) if cut.any() else 0.0
    limit = run.limits.missed["selected"]
    return Verdict(
        error <= limit and not lost[~cut].any(),
        error,
        limit,
        f"missed in {int(cut.sum())} cut rows",
    )


def check_caches(run: Run) -> None:
    """Caches after a free prefill. The first layer's have nothing to drift with."""
    for stem in run.golden.stems("caches_"):
        golden = run.golden.tensors(stem)
        for prompt in run.golden.prompts:
            keys = sorted(key for key in golden if key.startswith(f"P{prompt}."))
            if run.report.wants_any(stem, keys):
                _caches(run, stem, prompt, keys)


def _caches(run: Run, stem: str, prompt: int, keys: list[str]) -> None:
    golden = run.golden.tensors(stem)
    held = _held(run, golden, prompt)
    note = f"golden holds the first rows of P{held}'s" if held != prompt else ""
    state, _ = run.probe.prefill(run.golden.prompt(held))
    found = run.probe.caches(state)
    for key in keys:
        name = key.removeprefix(f"P{prompt}.")
        layer, kind = name.removeprefix("L").split(".")
        if name not in found:
            run.report.fail(f"{stem} {key}", f"the engine returned no {name}")
            continue
        want = golden[key]
        limit = run.limits.forced[kind] if layer == "0" else run.limits.free_caches
        got = found[name][: len(want)] if held != prompt else found[name]
        run.report.add(f"{stem} {key}", measure.relative(got, want, limit, note))


def _held(run: Run, golden: Tensors, prompt: int) -> int:
    """The prompt whose caches a file really holds under this one's name.

    tiny-a kept views, not copies: what it calls P16 was overwritten by the run of P33. Such arrays
    are compared with what they are.
    """
    names = [key.removeprefix(f"P{prompt}.") for key in golden if key.startswith(f"P{prompt}.")]
    for other in run.golden.prompts:
        if other > prompt and all(
            (later := golden.get(f"P{other}.{name}")) is not None
            and np.array_equal(
                golden[f"P{prompt}.{name}"], later[: len(golden[f"P{prompt}.{name}"])]
            )
            for name in names
        ):
            return other
    return prompt
