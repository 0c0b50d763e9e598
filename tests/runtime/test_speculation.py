"""Greedy speculative decoding gives the plain run's tokens, whatever is proposed and accepted.

Proposals are forced (helpers/forced.py), so that every acceptance length occurs, at odd and even
positions, across ring wraps, below and above window, top-k and pool limits of the tiny model.
`make exactness` runs the long version.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from helpers.forced import ForcedDrafts, Text
from ultraflash.runtime import Engine, Generation, RuntimeConfig, Sampling

LONG = os.environ.get("UF_EXACTNESS") == "1"
TOKENS = 2000 if LONG else 300
BLOCK = 7
PROMPTS = (9, 41, 130)  # below the window, above it, above what the candidate pool holds
ALL_LENGTHS: Counter[int] = Counter()


def open_engine(tmp: Path, rows: int, block: int, sequences: int = 1) -> Engine:
    config = RuntimeConfig(
        cache_dir=tmp,
        max_seq=2304,
        max_rows=rows,
        draft_block=block,
        width="all",
        store_bytes=0,
        max_sequences=sequences,
    )
    return Engine.open(config)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(length).integers(3, 480, length))


def run(engine: Engine, prompts: list[tuple[int, ...]], tokens: int) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for ids in prompts:
        key = str(len(ids))
        out[key] = []
        engine.submit(key, Generation(ids, tokens, Sampling(0.0), ignore_eos=True))
    while engine.has_work:
        for step in engine.step():
            out[step.key] += step.tokens
    return out


@cache
def plain(length: int, folder: Path) -> tuple[int, ...]:
    """The answer without any drafting."""
    return tuple(run(open_engine(folder, 1, 0), [prompt(length)], TOKENS)[str(length)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("rows", range(2, 9))
def test_one_sequence(rows: int, folder: Path) -> None:
    length = PROMPTS[rows % len(PROMPTS)]
    assert forced(folder, rows, [length]) == {str(length): list(plain(length, folder))}


@pytest.mark.parametrize("rows", range(4, 9))
def test_three_sequences(rows: int, folder: Path) -> None:
    wanted = {str(n): list(plain(n, folder)) for n in PROMPTS}
    assert forced(folder, rows, list(PROMPTS)) == wanted


def test_every_acceptance_length_occurred(folder: Path) -> None:
    # Also when this test runs alone, or the others ran in another process.
    while min(ALL_LENGTHS[n] for n in range(BLOCK + 1)) < 100:
        forced(folder, BLOCK + 1, [PROMPTS[1]])
    assert all(ALL_LENGTHS[n] >= 100 for n in range(BLOCK + 1)), ALL_LENGTHS


def test_own_proposals(folder: Path) -> None:
    """Nothing forced: what the draft stages really propose, each block size."""
    for block in (5, 6, 7):
        engine = open_engine(folder, block + 1, block)
        got = run(engine, [prompt(PROMPTS[1])], 60)
        assert got[str(PROMPTS[1])] == list(plain(PROMPTS[1], folder)[:60])


def forced(folder: Path, rows: int, lengths: list[int]) -> dict[str, list[int]]:
    engine = open_engine(folder, rows, BLOCK, len(lengths))
    texts = [Text(prompt(n) + plain(n, folder), n) for n in lengths]
    vocab = engine.model.vocab
    engine._plans = ForcedDrafts(engine._plans, texts, BLOCK, vocab, ALL_LENGTHS)
    return run(engine, [prompt(n) for n in lengths], TOKENS)
