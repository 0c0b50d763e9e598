"""The online table of what confidences are worth."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.properties import examples
from ultraflash.runtime.calibration import BINS, MEMORY, Calibration, sigmoid
from ultraflash.runtime.errors import ConfigError

B = 5


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def test_without_observations_it_is_the_identity() -> None:
    logits = np.linspace(-30, 30, 400).reshape(-1, 1) * np.ones(B)
    np.testing.assert_allclose(Calibration.start(B).apply(logits), sigmoid(logits), rtol=1e-12)


def test_sigmoid_survives_extremes() -> None:
    np.testing.assert_array_equal(sigmoid(np.array([-1000.0, 0.0, 1000.0])), [0, 0.5, 1])


def test_only_outcomes_that_were_seen_are_counted() -> None:
    kept, accepted = np.array([5, 5, 3, 3, 0]), np.array([5, 2, 3, 0, 0])
    table = Calibration.start(B).observed(np.zeros((5, B)), kept, accepted)
    raw, passed, drafts = table.counts.sum(axis=2)
    # First: all five. Second: two accepted, the third rejected. Third: its three. Fourth: one
    # rejected. Fifth: nothing was verified.
    np.testing.assert_allclose(drafts, [4, 3, 3, 1, 1])
    np.testing.assert_allclose(passed, [3, 3, 2, 1, 1])
    np.testing.assert_allclose(raw, drafts / 2)


def test_a_step_without_drafts_changes_nothing() -> None:
    table = Calibration.start(B)
    assert table.observed(np.zeros((2, B)), np.zeros(2, np.int64), np.zeros(2, np.int64)) is table


def test_it_learns_a_head_that_is_too_sure_and_keeps_positions_apart(
    rng: np.random.Generator,
) -> None:
    table = Calibration.start(2)
    for _ in range(40):
        logits = rng.normal(1.0, 1.5, (100, 2))
        truth = sigmoid(0.6 * logits - 0.5)  # position 0; position 1 is as good as its word
        truth[:, 1] = sigmoid(logits[:, 1])
        accepted = np.minimum.accumulate(rng.random((100, 2)) < truth, axis=1).sum(axis=1)
        table = table.observed(logits, np.full(100, 2), accepted)
    at = np.array([-1.0, 0.0, 1.0, 2.0, 3.0])[:, None] * np.ones(2)
    got = table.apply(at)
    np.testing.assert_allclose(got[:, 0], sigmoid(0.6 * at[:, 0] - 0.5), atol=0.06)
    np.testing.assert_allclose(got[:, 1], sigmoid(at[:, 1]), atol=0.06)


def test_old_outcomes_fade() -> None:
    one, kept = np.full((64, 1), logit(0.7)), np.ones(64, np.int64)
    table = Calibration.start(1)
    for passed in (1, 0):
        for _ in range(int(3 * MEMORY) // 64):
            table = table.observed(one, kept, np.full(64, passed))
        assert table.counts[2].sum() <= MEMORY * 1.01
    assert table.apply(one[:1])[0, 0] < 0.1


@st.composite
def tables(draw: st.DrawFn) -> Calibration:
    shape = (B, BINS)
    drafts = draw(hnp.arrays(np.float64, shape, elements=st.floats(0, 4096)))
    part = hnp.arrays(np.float64, shape, elements=st.floats(0, 1))
    return Calibration(np.stack([draw(part) * drafts, draw(part) * drafts, drafts]))


@examples(100)
@given(table=tables(), logits=hnp.arrays(np.float64, 30, elements=st.floats(-50, 50), unique=True))
def test_more_confidence_never_means_less(table: Calibration, logits: np.ndarray[Any, Any]) -> None:
    got = table.apply(np.sort(logits)[:, None] * np.ones(B))
    assert (np.diff(got, axis=0) >= -1e-12).all()
    assert ((got >= 0) & (got <= 1)).all()


@examples(30)
@given(table=tables())
def test_it_survives_a_file(table: Calibration) -> None:
    again = Calibration.from_plain(json.loads(json.dumps(table.to_plain())), B)
    np.testing.assert_array_equal(again.counts, table.counts)


def test_fewer_confidences_than_positions_may_be_asked_for() -> None:
    assert Calibration.start(B).apply(np.zeros((3, 2))).shape == (3, 2)
    assert Calibration.start(B).apply(np.zeros((3, 0))).shape == (3, 0)


def test_files_that_do_not_fit_are_refused() -> None:
    plain = Calibration.start(B).to_plain()
    with pytest.raises(ConfigError, match="for block 5 does not fit version 1 and block 6"):
        Calibration.from_plain(plain, 6)
    with pytest.raises(ConfigError, match="calibration of version None"):
        Calibration.from_plain({}, B)
    counts: dict[str, Any] = plain["counts"]
    for broken in (
        {"raw": counts["raw"]},
        {**counts, "raw": "many"},
        {**counts, "raw": [[0.0]]},
        {name: [[0.0]] for name in counts},
        {**counts, "accepted": (np.ones((B, BINS))).tolist()},
        {**counts, "drafts": np.full((B, BINS), np.nan).tolist()},
    ):
        with pytest.raises(ConfigError, match="calibration is damaged"):
            Calibration.from_plain({**plain, "counts": broken}, B)
