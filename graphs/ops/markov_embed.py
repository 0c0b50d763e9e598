"""Embedding of the token before a drafted one, for the Markov and confidence heads (model.md
6.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.graphs.numerics import F32
from ultraflash.graphs.plan import Cost, Geometry, Op, Ref
from ultraflash.graphs.rows import I32


@dataclass(frozen=True)
class MarkovEmbed(Op):
    """y = table[token before draft `index`]: the anchor for the first draft, then the draft before.

    Shapes:
        anchor: [S] i32; drafts: [S, B] i32; table: [V, r] bf16; y: [S, r] bf16.
    """

    anchor: Ref
    drafts: Ref
    table: Ref
    y: Ref
    index: int

    @staticmethod
    def reference(anchor: I32, drafts: I32, table: F32, index: int) -> F32:
        """A gather; exact."""
        return table[anchor if index == 0 else drafts[:, index - 1]]

    def geometry(self) -> Geometry:
        """A CTA a sequence."""
        return Geometry(self.anchor.shape[0], threads=128)

    def cost(self) -> Cost:
        """Only the gathered rows."""
        return Cost(2 * self.y.nbytes, 0)
