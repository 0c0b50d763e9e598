"""Which restore points a conversation leaves and may use, in plain words.

Works on whole prefixes instead of keys: slow, and nothing to get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

EOS, USER, ASSISTANT = 1, 490, 491  # ids of the tiny tokenizers


@dataclass
class Rules:
    """The points that a store without limit has after the requests that `note` was told of."""

    window: int
    every: int  # tokens between regular points
    points: set[tuple[int, ...]] = field(default_factory=set)

    def best(self, ids: Sequence[int]) -> int:
        """The longest candidate of a prompt at which there is a point."""
        marks = [i for i, token in enumerate(ids) if token in (EOS, ASSISTANT)]
        ends = [*marks, *range(self.every, len(ids), self.every), ids.index(USER)]
        return max((n for n in ends if tuple(ids[:n]) in self.points), default=0)

    def note(self, ids: Sequence[int], answer: Sequence[int], finish: str) -> None:
        """A request was answered: the points that it must have left."""
        whole = [*ids, *answer]
        # The token that filled the answer up was never processed; a stop id is not among these.
        processed = len(whole) - (finish == "length")
        header = max(i for i, token in enumerate(ids) if token == ASSISTANT)
        ends = [header, processed, *range(self.every, processed + 1, self.every)]
        if ids.index(USER) >= self.window:
            ends.append(ids.index(USER))
        self.points |= {tuple(whole[:n]) for n in ends}
