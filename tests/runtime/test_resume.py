"""The rules of resuming, as a table and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.properties import examples
from ultraflash.runtime.resume import ALL_LAYERS, Kind, Run, point_kind, resume

TAIL, WINDOW, REACH = 136, 128, 128
CED = ("ced20", "ced21")


@pytest.mark.parametrize(
    ("mode", "kind", "suffix", "run"),
    [
        ("full", None, 5000, ALL_LAYERS),
        ("full", Kind.FULL, 1, ALL_LAYERS),
        ("full", Kind.FULL, 5000, ALL_LAYERS),
        ("full", Kind.ENCODER, 5000, None),
        *(
            row
            for mode in CED
            for row in (
                (mode, None, 20, Run(20)),
                (mode, None, 136, Run(136)),
                (mode, None, 5000, Run(136)),
                (mode, Kind.FULL, 1, ALL_LAYERS),
                (mode, Kind.FULL, 511, ALL_LAYERS),
                (mode, Kind.FULL, 512, Run(136)),
                (mode, Kind.ENCODER, 135, None),
                (mode, Kind.ENCODER, 136, Run(136)),
                (mode, Kind.ENCODER, 5000, Run(136)),
            )
        ),
    ],
)
def test_what_runs(mode: str, kind: Kind | None, suffix: int, run: Run | None) -> None:
    assert resume(mode, TAIL, kind, suffix) == run


@pytest.mark.parametrize(
    ("prompt", "length", "kind"),
    [
        (5000, 4096, Kind.ENCODER),
        (5000, 4991, Kind.ENCODER),  # its window begins before the replay
        (5000, 4992, Kind.FULL),
        (5000, 5000, Kind.FULL),
        (5000, 5001, Kind.FULL),
        (136, 50, Kind.FULL),  # all of the prompt was replayed
        (137, 50, Kind.ENCODER),
        (137, 129, Kind.FULL),
    ],
)
def test_what_a_replay_leaves(prompt: int, length: int, kind: Kind) -> None:
    run = resume("ced20", TAIL, None, prompt)
    assert run is not None
    assert point_kind(run, prompt, length, WINDOW, REACH) is kind
    assert point_kind(ALL_LAYERS, prompt, length, WINDOW, REACH) is Kind.FULL


@examples(300)
@given(
    tail=st.integers(WINDOW, 600),
    start=st.integers(0, 900),
    suffix=st.integers(1, 900),
    back=st.integers(0, 900),
)
def test_a_full_point_never_claims_rows_that_were_not_run(
    tail: int, start: int, suffix: int, back: int
) -> None:
    kind = Kind.ENCODER if start else None
    run, prompt = resume("ced21", tail, kind, suffix), start + suffix
    length = prompt - back
    if run is None or run.replay is None or length <= start:
        return
    if point_kind(run, prompt, length, WINDOW, REACH) is Kind.FULL:
        first_run = prompt - run.replay
        assert max(0, length - WINDOW) >= first_run
        assert prompt - length <= REACH
    # Decoding needs a whole window behind the prompt.
    assert point_kind(run, prompt, prompt, WINDOW, REACH) is Kind.FULL
