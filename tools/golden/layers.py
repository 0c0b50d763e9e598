"""Net 2, the sharp one: every layer from the golden stream, and everything that layer makes.

A free run mixes a layer's own mistakes with drift from below; here the golden stream goes in, so a
correct layer is off by isolated ulps at most. Selections are given as well: attention is compared
on the golden ones, the layer's own come back beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ultraflash.tools.golden import limits, measure
from ultraflash.tools.golden.data import Array, Tensors
from ultraflash.tools.golden.measure import Verdict
from ultraflash.tools.golden.run import Run

_CHOICES = {
    "expert_ids": ("experts", limits.EXPERT_ROWS),
    "sel": ("selected", limits.SELECTED_ROWS),
}


def check_layers(run: Run) -> None:
    """Every `layers_{variant}_P{P}` file."""
    for stem in run.golden.stems("layers_"):
        golden = run.golden.tensors(stem)
        if run.report.wants_any(stem, golden):
            _File(run, stem, golden).check()


@dataclass
class _File:
    run: Run
    stem: str
    golden: Tensors
    # Layers that ran on this engine's own stream in some call, and layers that read the caches of
    # such a layer.
    chained: set[int] = field(default_factory=set)

    def check(self) -> None:
        """The calls in order over one sequence, then what they left in the caches."""
        probe = self.run.probe
        (call, ids), *later = self._calls()
        state = probe.begin(ids)
        self._call(state, call)
        for call, ids in later:
            probe.advance(state, ids)
            self._call(state, call)
        caches = probe.caches(state)
        for key in sorted(key for key in self.golden if key.startswith("cache_after.")):
            name = key.removeprefix("cache_after.")
            layer, kind = name.removeprefix("L").split(".")
            self._compare(key, kind, int(layer), {kind: caches[name]} if name in caches else {})

    def _calls(self) -> Iterator[tuple[str, list[int]]]:
        prompt = int(self.stem.rpartition("_P")[2])
        yield "prefill", self.run.golden.prompt(prompt)
        for step, token in enumerate(self.run.golden.decode(prompt)):
            if f"decode{step}.logits" in self.golden:
                yield f"decode{step}", [token]

    def _call(self, state: Any, call: str) -> None:
        model, golden = self.run.golden.model, self.golden
        stream: Array | None = None
        pre: Array | None = None
        hashes: list[Array] = []
        for layer in range(model.num_layers):
            prefix = f"{call}.L{layer}."
            ratio = model.ratio(layer)
            sel = golden[f"{call}.L{model.index_source(layer)}.sel"] if ratio else None
            if ratio and model.kv_source(layer) in self.chained:
                self.chained.add(layer)
            out = self.run.probe.forced_layer(state, layer, stream, pre, sel)
            for key in sorted(key for key in golden if key.startswith(prefix)):
                self._compare(key, key.removeprefix(prefix), layer, out)
            if layer in model.engram_layers and "hash" in out:
                hashes.append(out["hash"])
            pre = golden[prefix + "pre"]
            stream = golden.get(prefix + "X")
            if stream is None:
                stream = out["X"]
                self.chained.add(layer + 1)
        assert stream is not None
        assert pre is not None
        found = self.run.probe.forced_head(state, stream, pre)
        if hashes:
            found["hash"] = np.stack(hashes, axis=1)
        for name in ("hash", "head_in", "logits"):
            self._compare(f"{call}.{name}", name, model.num_layers, found)

    def _compare(self, key: str, name: str, layer: int, out: Mapping[str, Array]) -> None:
        item = f"{self.stem} {key}"
        if name in out:
            self.run.report.add(item, self._judge(key, name, layer, out))
        else:
            self.run.report.fail(item, f"the engine returned no {name}")

    def _judge(self, key: str, name: str, layer: int, out: Mapping[str, Array]) -> Verdict:
        got, want = np.asarray(out[name]), self.golden[key]
        if name == "hash":
            return measure.exact(got, want)
        chained = layer in self.chained
        note = "from this engine's own stream" if chained else ""
        if name in _CHOICES:
            kind, share = _CHOICES[name]
            if not chained:
                return measure.sets(got, want, share)
            missed = float(measure.missed(got, want).mean())
            return measure.within(missed, self.run.limits.missed[kind], f"missed, {note}")
        limit = self.run.limits.forced[name]
        if chained:
            limit = min(limit * self.run.limits.chained, self.run.limits.free_caches)
        if name == "expert_w":
            golden_ids = self.golden[key.removesuffix("expert_w") + "expert_ids"]
            return measure.paired(out["expert_ids"], got, golden_ids, want, limit)
        if name == "index_scores":
            share = limits.SELECTED_ROWS if not chained else self.run.limits.missed["selected"]
            return _scores(got, want, limit, share)
        return measure.relative(got, want, limit, note)


def _scores(got: Array, want: Array, limit: float, share: float) -> Verdict:
    """Scores where both are finite; a `share` of the rows may have another pool."""
    bad = measure.misshapen(got, want)
    if bad:
        return bad
    mine, theirs = np.isfinite(got), np.isfinite(want)
    other = int((mine != theirs).any(axis=1).sum())
    both = mine & theirs
    error = measure.relative_rms(got[both], want[both])
    ok = error <= limit and other <= int(share * len(want))
    return Verdict(ok, error, limit, f"rows with another pool: {other} of {len(want)}")
