"""A `GoldenProbe` that answers with the golden arrays themselves: what a perfect engine would say.

It tests `check_golden`, not the engine. `spoil` changes every array on its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.tools.golden.data import Golden, ids_of

Array = npt.NDArray[Any]


def _same(array: Array) -> Array:
    return array


class FakeProbe:
    """Knows the golden sequences only; a state is the ids so far, or a forced file and call."""

    def __init__(self, golden: Golden, spoil: Callable[[Array], Array] = _same) -> None:
        self._golden = golden
        self._spoil = spoil
        self._rows = _logits_by_prefix(golden)
        self._unused = golden.stems("layers_")

    # --- free runs ---

    def prefill(self, ids: Sequence[int]) -> tuple[list[int], Array]:
        state: list[int] = []
        return state, self.extend(state, ids)

    def prompt(self, ids: Sequence[int], chunk: int) -> tuple[list[int], Array]:
        state, logits = self.prefill(ids)
        return state, logits[-1:]

    def extend(self, state: list[int], ids: Sequence[int]) -> Array:
        rows = []
        for token in ids:
            state.append(token)
            rows.append(self._rows[tuple(state)])
        return self._spoil(np.stack(rows))

    def trace(self, ids: Sequence[int]) -> dict[str, Array]:
        return self._named("decisions", f"P{len(ids)}.")

    # --- forced layers ---

    def begin(self, ids: Sequence[int]) -> dict[str, Any]:
        stem = next(s for s in self._unused if s.endswith(f"_P{len(ids)}"))
        self._unused.remove(stem)
        return {"stem": stem, "call": "prefill", "rows": len(ids)}

    def advance(self, state: dict[str, Any], ids: Sequence[int]) -> None:
        step = 0 if state["call"] == "prefill" else int(state["call"].removeprefix("decode")) + 1
        state.update(call=f"decode{step}", rows=len(ids))

    def forced_layer(
        self, state: dict[str, Any], layer: int, stream: Any, pre: Any, sel: Any
    ) -> dict[str, Array]:
        model = self._golden.model
        out = self._named(state["stem"], f"{state['call']}.L{layer}.")
        out.setdefault("X", np.zeros((state["rows"], model.hc, model.hidden), np.float32))
        if layer in model.engram_layers:
            rows = self._golden.tensors(state["stem"])[f"{state['call']}.hash"]
            out["hash"] = self._spoil(rows[:, model.engram_layers.index(layer)])
        return out

    def forced_head(self, state: dict[str, Any], stream: Any, pre: Any) -> dict[str, Array]:
        found = self._named(state["stem"], state["call"] + ".")
        return {name: found[name] for name in ("head_in", "logits")}

    def caches(self, state: Any) -> dict[str, Array]:
        if isinstance(state, dict):
            return self._named(state["stem"], "cache_after.")
        return self._named("caches_f32idx", f"P{len(state)}.")

    # --- parts ---

    def quant(self, kind: str, x: Array) -> tuple[Array, ...]:
        found = self._named("quant", kind + ".")
        return (
            next(found[n] for n in found if n.startswith("codes")),
            found["scales"],
            found["deq"],
        )

    def rope(self, table: str, positions: Array, x: Array, inverse: bool) -> Array:
        return self._named("rope", table + ".")["rot_inverse" if inverse else "rot"]

    def rope_table(self, table: str, positions: Array) -> tuple[Array, Array, Array]:
        found = self._named("rope", table + ".")
        return found["freq"], found["cos"], found["sin"]

    def engram_constants(self, which: str) -> dict[str, Array]:
        return self._named("engram_hash", which + ".")

    def hash_rows(self, which: str, ids: Array, live: Array) -> Array:
        golden = self._golden.tensors("engram_hash")
        match = (golden[f"{which}.ids"] == ids).all(1) & (golden[f"{which}.live"] == live).all(1)
        return self._spoil(golden[f"{which}.rows"][int(match.argmax())])

    def token_map(self) -> Array:
        return self._spoil(self._golden.tensors("engram_hash")["tiny.token_map"])

    def sinkhorn(self, mixes: Array, scale: Array, base: Array, iters: int) -> tuple[Array, ...]:
        found = self._named("sinkhorn", f"iters{iters}.")
        return found["pre"], found["post"], found["comb"]

    def layer_mix(self, layer: int, stream: Array, y: Array) -> dict[str, Array]:
        return self._named("sinkhorn", "mix.")

    def gate(
        self, x: Array, weight: Array, bias: Array, vl: Array, image: Array, k: int, scale: float
    ) -> tuple[Array, Array]:
        which = "tiny" if len(weight) == self._golden.model.experts else "full"
        found = self._named("gate", which + ".")
        return found["ids_sorted"], found["w_sorted"]

    def tokenize(self, text: str) -> list[int]:
        for case in self._golden.json("chat.json")["plain"]:
            if case["text"] == text:
                return ids_of(self._spoil(np.array([*case["ids"], 0])))[:-1]
        raise AssertionError(text)

    def _named(self, stem: str, prefix: str) -> dict[str, Array]:
        golden = self._golden.tensors(stem)
        return {
            key.removeprefix(prefix): self._spoil(golden[key])
            for key in golden
            if key.startswith(prefix)
        }


def _logits_by_prefix(golden: Golden) -> dict[tuple[int, ...], Array]:
    """The golden logits after every prefix of every golden sequence."""
    rows: dict[tuple[int, ...], Array] = {}
    logits, greedy = golden.tensors("logits"), golden.tensors("greedy")
    for prompt in golden.prompts:
        ids = golden.prompt(prompt)
        if f"P{prompt}.ids" in greedy:
            follow = ids_of(greedy[f"P{prompt}.ids"])
            top = greedy[f"P{prompt}.f32idx.ids_top8"]
            values = greedy[f"P{prompt}.f32idx.logits_top8"]
            for step in range(len(follow)):
                row = np.full(golden.model.vocab, values[step].min() - 1, np.float32)
                row[top[step]] = values[step]
                rows[tuple(ids + follow[:step])] = row
        sequence = ids + golden.decode(prompt)
        known = [logits[f"f32idx.{kind}.P{prompt}"] for kind in ("prefill", "decode")]
        for end, row in enumerate(np.concatenate(known), start=1):
            rows[tuple(sequence[:end])] = row
    return rows
