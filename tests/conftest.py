"""What every test gets: a seed from its own name, and a skip with a reason when hardware is absent.

Helpers live in helpers/, so that nothing imports from here.
"""

from __future__ import annotations

import hashlib
import os

# Matrices of the tiny models are too small to share: on two busy cores a second BLAS thread made
# the tests several times slower, as each waits for the other by spinning. Read at numpy's import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

from helpers.devices import num_gpus


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same number for the same test on every machine, another one for every other test."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:8], "little")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 1 if item.get_closest_marker("gpu") else 0
    if marker := item.get_closest_marker("gpus"):
        needed = int(marker.args[0])
    if needed and num_gpus() < needed:
        reason = f"needs {needed} CUDA device(s), this machine has {num_gpus()}"
        if os.environ.get("UF_REQUIRE_GPU") == "1":
            pytest.fail(f"{reason}, and UF_REQUIRE_GPU=1 forbids skipping", pytrace=False)
        pytest.skip(reason)
