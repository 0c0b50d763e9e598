"""Proposals that are right up to a chosen depth, so that every acceptance length occurs.

Random tiny models accept hardly anything by themselves. `ForcedDrafts` stands between an engine and
its plans and replaces what was proposed by the plain run's own continuation with one error in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ultraflash.graphs.width import Rule
from ultraflash.runtime.plans import Plans, Result
from ultraflash.runtime.step_io import Part


class Text(list[int]):
    """A whole sequence that knows how long its prompt is."""

    def __init__(self, ids: Sequence[int], prompt: int) -> None:
        super().__init__(ids)
        self.prompt = prompt


class ForcedDrafts(Plans):
    """Plans whose proposals come from known continuations.

    `texts` are whole sequences (prompt and greedy answer) that begin differently; `lengths` counts
    how often each number of drafts was accepted, and may go on from an earlier run.
    """

    def __init__(
        self, plans: Plans, texts: Sequence[Text], block: int, vocab: int, lengths: Counter[int]
    ) -> None:
        self.__dict__.update(plans.__dict__)
        self._texts, self._block_rows, self._vocab = texts, block, vocab
        self._rng = np.random.default_rng(block)
        self._by_slot: dict[int, Text] = {}
        self.lengths = lengths

    def prefill(self, part: Part, ends: bool) -> Result | None:
        if part.start == 0:
            self._by_slot[part.slot] = next(
                t for t in self._texts if list(t[: len(part.ids)]) == list(part.ids)
            )
        result = super().prefill(part, ends)
        return self._force(part, result) if result else None

    def decode(
        self, parts: list[Part], rule: Rule | None = None, ahead: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Result]:  # fmt: skip
        # Never ahead: what is forced is not what the device would go on with.
        results = super().decode(parts, rule, 0, meanwhile)
        self.lengths.update(r.accepted for r in results)
        return [self._force(p, r) for p, r in zip(parts, results, strict=True)]

    def _force(self, part: Part, result: Result) -> Result:
        text = self._by_slot[part.slot]
        decoding = part.start >= text.prompt
        # Behind a prompt the token follows the part's last row, later the last accepted one.
        last = part.start + (result.accepted if decoding else len(part.ids) - 1)
        drafts = list(text[last + 2 : last + 2 + self._block_rows])
        drafts += [0] * (self._block_rows - len(drafts))
        # The depth seen least so far: all lengths fill up evenly.
        wrong = min(range(self._block_rows + 1), key=lambda n: self.lengths[n])
        if wrong < self._block_rows:
            drafts[wrong] = (
                drafts[wrong] + 1 + int(self._rng.integers(self._vocab - 1))
            ) % self._vocab
        return result._replace(drafts=tuple(drafts))
