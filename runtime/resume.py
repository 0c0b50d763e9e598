"""What to run for a prompt whose first tokens are restored, and what state that leaves.

Pure functions of the prefill mode, the kind of restore point and lengths (architecture.md section
7), so that two servers given the same point do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Rows behind a full point up to which it is cheaper to run all layers than to replay a tail.
LONGEST_FULL = 511


class Kind(StrEnum):
    """What a restore point holds."""

    FULL = "full"  # windows of all layers and of the draft stages
    ENCODER = "encoder"  # nothing of the decoder: what CED has in the middle of a prompt


@dataclass(frozen=True, slots=True)
class Run:
    """How the rest of a prompt is run.

    `replay` None: every row through all layers, their windows restored. Else every row through the
    encoder, then the last `replay` rows through the decoder, whose windows begin with them.
    """

    replay: int | None


ALL_LAYERS = Run(None)


def resume(mode: str, tail: int, kind: Kind | None, suffix: int) -> Run | None:
    """What to run for `suffix` rows behind a point of `kind` (None: behind nothing at all).

    None when such a point is of no use here: look for an earlier one.
    """
    if mode == "full":
        return None if kind is Kind.ENCODER else ALL_LAYERS
    if kind is Kind.FULL and suffix <= LONGEST_FULL:
        return ALL_LAYERS
    if kind is Kind.ENCODER and suffix < tail:
        return None
    return Run(min(tail, suffix))


def point_kind(run: Run, prompt: int, length: int, window: int, reach: int) -> Kind:
    """What a point at `length` can hold when the first `prompt` tokens were prefilled by `run`.

    `reach`: how far behind the last row written a window of `window` rows is still whole. A decoder
    window exists once the replay covers all of it; by then the encoder must not have gone farther
    than its own windows reach.
    """
    if run.replay is None:
        return Kind.FULL
    first = prompt - run.replay
    covered = first == 0 or length - window >= first
    return Kind.FULL if covered and prompt - length <= reach else Kind.ENCODER
