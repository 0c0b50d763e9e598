"""Every plan that a server with given settings may run: what is compiled and captured before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build


@dataclass(frozen=True)
class Served:
    """Widths of decode steps, sequences in them, chunks of prompts and how these prefill."""

    rows: Sequence[int] = tuple(range(1, 9))
    sequences: Sequence[int] = (1,)
    chunks: Sequence[int] = (16, 128)
    prefill: str = "full"
    tail: int = 136

    def plans(self, build: Build) -> Iterator[Plan]:
        """Decode plans by width, then those of prompts.

        Raises:
            WorldError: when the model cannot be split over `build.world` ranks.
        """
        for rows in self.rows:
            for sequences in self.sequences:
                if (
                    sequences <= rows <= sequences * (1 + build.block)
                ):  # no more drafts are verified
                    yield build_decode(build, rows, sequences)
        for rows in self.chunks:
            yield build_prefill(build, rows, ends=False)
            yield build_prefill(build, rows)
            if self.prefill != "full":
                yield build_encode(build, self.prefill, self.tail, rows)
        if self.prefill != "full":
            yield build_replay(build, self.prefill, self.tail)
