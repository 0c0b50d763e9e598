"""Constants of the Engram hash: which table rows the last few tokens point at.

Pure integer arithmetic on the configuration, model.md section 4.3. The compressed ids that are
hashed come from the tokenizer and are the business of `runtime.weights.token_map`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import isqrt

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.errors import ConfigError
from ultraflash.graphs.model import Model

_SEED_STEP = 10007  # the layer's number times this seeds its multipliers


@dataclass(frozen=True)
class EngramHash:
    """The hash of one layer.

    Shapes: multipliers int64 [max order], one per look-back distance; primes and offsets int64
    [columns], column order = (order 2, heads), (order 3, heads), ...
    """

    multipliers: npt.NDArray[np.int64]
    primes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def engram_hashes(model: Model) -> dict[int, EngramHash]:
    """The hash constants of every Engram layer, by layer number.

    Raises:
        ConfigError: when the configured rows of a table are not the sum of its primes.
    """
    used: set[int] = set()  # one set over all layers: no prime serves twice
    hashes = {}
    for layer, rows in zip(model.engram_layers, model.engram_rows, strict=True):
        primes = [p for _ in range(model.engram_orders) for p in _take(model, used)]
        if sum(primes) != rows:
            raise ConfigError(
                f"config.json gives {rows} rows to the Engram table of layer {layer} but its "
                f"{len(primes)} hash primes add up to {sum(primes)}: check engram_num_embeddings, "
                f"engram_vocab_size and engram_n_heads"
            )
        columns = np.array(primes, np.int64)
        hashes[layer] = EngramHash(
            _multipliers(model, layer), columns, np.cumsum(columns) - columns
        )
    return hashes


def table_rows(model: Model) -> tuple[int, ...]:
    """The table sizes that base and heads imply: what `engram_num_embeddings` has to say."""
    used: set[int] = set()
    return tuple(
        sum(p for _ in range(model.engram_orders) for p in _take(model, used))
        for _ in model.engram_layers
    )


def _take(model: Model, used: set[int]) -> list[int]:
    """One prime a head, each order starting again at the base and passing over what is taken."""
    taken = list(
        islice((p for p in _primes_from(model.engram_base) if p not in used), model.engram_heads)
    )
    used.update(taken)
    return taken


def _primes_from(start: int) -> Iterator[int]:
    # Trial division: bases of some 10^7 need a few thousand divisors for a few hundred candidates.
    return (n for n in count(max(start, 2)) if all(n % d for d in range(2, isqrt(n) + 1)))


def _multipliers(model: Model, layer: int) -> npt.NDArray[np.int64]:
    # Half of what keeps id * multiplier within int64; 2u + 1 makes them odd.
    bound = (2**63 - 1) // model.engram_vocab // 2
    draw = np.random.default_rng(_SEED_STEP * layer).integers(
        0, bound, size=model.engram_max_order, dtype=np.int64
    )
    return 2 * draw + 1
