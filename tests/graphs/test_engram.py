"""Primes, multipliers and hash rows of the release and of the tiny model (model.md 4.3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.checkpoints import GOLDEN, bundled_model
from ultraflash.graphs.engram import EngramHash, engram_hashes, table_rows
from ultraflash.graphs.errors import ConfigError
from ultraflash.graphs.model import Model
from ultraflash.graphs.release import release_model

PRIMES = {
    1: """16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183
          16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321
          16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463""",
    14: """16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627
           16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769
           16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889""",
}
MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
DEAD = -1
CHECK_IDS = [0, 7, 99091, DEAD, 12345, 8]
PAD = 2


@pytest.fixture(scope="module")
def release() -> dict[int, EngramHash]:
    return engram_hashes(release_model())


def hash_row(constants: EngramHash, ids: list[int], position: int, heads: int) -> list[int]:
    """The definition, in Python integers: rows of one position."""
    terms, alive = [], True
    for distance in range(len(constants.multipliers)):
        at = position - distance
        alive = alive and at >= 0 and ids[at] != DEAD
        terms.append(ids[at] if alive else PAD)
    mixed = [terms[0] * int(constants.multipliers[0])]
    for term, multiplier in zip(terms[1:], constants.multipliers[1:], strict=True):
        mixed.append(mixed[-1] ^ term * int(multiplier))
    return [
        mixed[1 + column // heads] % int(prime) + int(offset)
        for column, (prime, offset) in enumerate(
            zip(constants.primes, constants.offsets, strict=True)
        )
    ]


@pytest.mark.parametrize("layer", [1, 14])
def test_release_constants(release: dict[int, EngramHash], layer: int) -> None:
    assert release[layer].primes.tolist() == [int(p) for p in PRIMES[layer].split()]
    assert release[layer].multipliers.tolist() == MULTIPLIERS[layer]
    assert release[layer].offsets[:2].tolist() == [0, release[layer].primes[0]]
    model = release_model()
    rows = dict(zip(model.engram_layers, model.engram_rows, strict=True))
    assert release[layer].primes.sum() == rows[layer]


@pytest.mark.parametrize(
    ("position", "layer", "first", "last"),
    [
        (
            2, 1,
            [4120285, 20896480, 38390893, 58888205, 70109306, 81443105, 96533837, 125252592],
            375588124,
        ),
        (2, 14, [3896432, 26583606], 373515775),
        (5, 1, [15464199, 25141986, 33305864], 373200112),
        (0, 1, [5702652, 24393184, 39183301], 380066193),
    ],
)  # fmt: skip
def test_check_vectors(
    release: dict[int, EngramHash], position: int, layer: int, first: list[int], last: int
) -> None:
    rows = hash_row(release[layer], CHECK_IDS, position, heads=8)
    assert rows[: len(first)] == first
    assert rows[-1] == last


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_constants_equal_the_reference(size: str) -> None:
    golden = load_file(GOLDEN / "expected" / "engram_hash.safetensors")
    model = release_model() if size == "full" else Model.from_checkpoint(GOLDEN / "ckpt")
    hashes = list(engram_hashes(model).values())
    for name in ("multipliers", "primes", "offsets"):
        ours = np.stack([getattr(h, name) for h in hashes])
        assert np.array_equal(ours, golden[f"{size}.{name}"].reshape(ours.shape)), name


def test_another_number_of_compressed_ids_changes_all_multipliers() -> None:
    model = replace(Model.from_checkpoint(GOLDEN / "ckpt"), engram_vocab=256)
    assert [h.multipliers.tolist() for h in engram_hashes(model).values()] == [
        [29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817],
        [31841131192811251, 1950019090429101, 28509641033320619, 7337012813361983],
    ]


def test_table_rows_of_both_sizes() -> None:
    assert table_rows(release_model()) == (384006168, 384016682)
    assert table_rows(bundled_model()) == (6126, 6332)


def test_a_table_size_that_is_no_sum_of_primes_is_refused() -> None:
    model = replace(bundled_model(), engram_rows=(6126, 6333))
    with pytest.raises(
        ConfigError, match=r"6333 rows to the Engram table of layer 4.* add up to 6332"
    ):
        engram_hashes(model)
