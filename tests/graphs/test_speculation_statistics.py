"""What speculation writes, statistically: the engine's own generator, verification, width rule and
keys over several steps, against the exact joint distribution of the first four tokens.

The engines of helpers/wrong_speculation.py must fail the very same test.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.exactness import LONG, sized
from helpers.speculation import Speculation, make_toy, total_variation, variation_bound
from helpers.wrong_speculation import (
    ArgmaxWidth,
    PositionKeys,
    PositionPurposeKeys,
    SharedFirstStep,
    ShortenedBlock,
)

VOCAB, BLOCK = 3, 4
CONVERSATIONS = sized(200_000, 1_000_000)
BATCH = 200_000
TOYS = sized((12,), (12, 14))  # models in which each of the wrong engines is far off

CASES = [
    (toy, verify, width, masked)
    for toy in TOYS
    for verify in ("block", "token")
    for width in ("all", "fixed", "adaptive")
    for masked in (False, True)
    if LONG or width == "adaptive" or not masked
]
WRONG = [
    (PositionKeys, "block", "adaptive", False),
    (PositionKeys, "token", "all", False),
    (PositionPurposeKeys, "block", "all", False),
    (SharedFirstStep, "block", "all", False),
    (ArgmaxWidth, "block", "adaptive", False),
    (ArgmaxWidth, "token", "adaptive", False),
    (ShortenedBlock, "block", "adaptive", True),
    (ShortenedBlock, "token", "all", True),
]


def name(value: object) -> str:
    if isinstance(value, bool):
        return "masked" if value else "free"
    return value.__name__ if isinstance(value, type) else str(value)


def check(engine: type[Speculation], toy: int, verify: str, width: str, masked: bool) -> None:
    models = make_toy(toy, VOCAB, BLOCK, masked)
    run = engine(models, verify, width)
    batches = [
        run.run(np.arange(start, start + BATCH, dtype=np.uint64))
        for start in range(0, CONVERSATIONS, BATCH)
    ]
    exact = models.joint()
    distance = total_variation(np.concatenate(batches), exact, VOCAB)
    bound = variation_bound(exact, CONVERSATIONS)
    print(f"{engine.__name__} {toy} {verify} {width} {masked}: {distance:.4f} of {bound:.4f}")
    if engine is Speculation:
        enough = run.steps_by_accepted > CONVERSATIONS / 200
        assert enough[: BLOCK if masked else None].all(), "a length hardly ever occurs"
        seen = run.steps_by_kept > CONVERSATIONS / 200
        assert seen[-1]
        assert width == "all" or seen.sum() >= 3, "the width hardly varies"
    assert distance < bound


@pytest.mark.parametrize(("toy", "verify", "width", "masked"), CASES, ids=name)
def test_four_tokens_are_distributed_as_the_targets(
    toy: int, verify: str, width: str, masked: bool
) -> None:
    check(Speculation, toy, verify, width, masked)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="wrong on purpose")
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(("engine", "verify", "width", "masked"), WRONG, ids=name)
def test_wrong_engines_are_found_out(
    engine: type[Speculation], toy: int, verify: str, width: str, masked: bool
) -> None:
    check(engine, toy, verify, width, masked)


def test_token_wise_rejection_forgives_keys_without_the_step() -> None:
    """Why block verification needs the step in its keys: token-wise never looks at a number behind
    the first rejection, so nothing that it meets again has been looked at."""
    check(PositionPurposeKeys, TOYS[0], "token", "all", masked=False)
