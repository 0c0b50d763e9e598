from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ops import assert_cost, assert_launch, scratch
from helpers.properties import examples
from ultraflash.graphs.ops.expert_rows import ExpertRows, num_chunks


@examples(200)
@given(data=st.data())
def test_every_pair_is_in_one_chunk_of_its_expert(data: st.DataObject) -> None:
    experts, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    k = data.draw(st.integers(1, experts))
    count = data.draw(st.integers(1, 20))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    favourites = rng.permutation(experts)[: data.draw(st.integers(k, experts))]
    picked = [np.sort(rng.permutation(favourites)[:k]) for _ in range(count)]
    ids = np.array(picked, np.int32)
    order, chunks = ExpertRows.reference(ids, experts, rows)
    assert order.dtype == chunks.dtype == np.int32
    assert sorted(order.tolist()) == list(range(count * k))
    used = [chunk for chunk in chunks.tolist() if chunk[2]]
    assert chunks.tolist() == used + [[0, 0, 0]] * (len(chunks) - len(used))
    assert [start for _, start, _ in used] == np.cumsum([0, *(c[2] for c in used)])[:-1].tolist()
    assert [expert for expert, _, _ in used] == sorted(expert for expert, _, _ in used)
    for expert, start, size in used:
        own = order[start : start + size]
        assert 0 < size <= rows
        assert (ids.reshape(-1)[own] == expert).all()
        assert own.tolist() == sorted(own.tolist())


@pytest.mark.parametrize(
    ("pairs", "experts", "rows", "chunks"), [(6, 384, 64, 6), (24576, 384, 64, 768), (7, 2, 3, 4)]
)
def test_chunks_suffice_however_rows_fall(pairs: int, experts: int, rows: int, chunks: int) -> None:
    assert num_chunks(pairs, experts, rows) == chunks
    used = min(experts, pairs)  # one more than full chunks for each expert but the largest
    counts = np.ones(used, np.int64)
    counts[0] += pairs - used
    assert (-(-counts // rows)).sum() <= chunks


OP = ExpertRows(
    scratch("i", 1024, 6, dtype="i32"),
    scratch("o", 6144, dtype="i32"),
    scratch("c", 480, 3, dtype="i32"),
    384,
    64,
)


def test_launch() -> None:
    assert_launch(OP, "expert_rows", ("i", "o", "c"), experts=384, rows=64)
    assert OP.geometry().shared == 4 * 384


def test_cost() -> None:
    assert_cost(OP, 4 * (6144 + 6144 + 480 * 3))
