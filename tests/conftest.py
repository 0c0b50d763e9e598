"""What every test gets: a seed from its own name, and a skip with a reason when hardware is absent.

Helpers live in helpers/, so that nothing imports from here.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

# Matrices of the tiny models are too small to share: on two busy cores a second BLAS thread made
# the tests several times slower, as each waits for the other by spinning. Read at numpy's import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

from helpers.devices import num_gpus

if TYPE_CHECKING:
    from helpers.fake_cuda import FakeCuda


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The same number for the same test on every machine, another one for every other test."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:8], "little")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A driver made of host memory in the place of the real one, on any machine."""
    from helpers.fake_cuda import FakeCuda  # here: most tests do without the CUDA bindings
    from ultraflash.runtime.gpu import driver

    fake = FakeCuda()
    monkeypatch.setattr(driver, "cu", fake)
    return fake


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept, so that each is compiled once in a run of tests."""
    return tmp_path_factory.mktemp("kernels")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 1 if item.get_closest_marker("gpu") else 0
    if marker := item.get_closest_marker("gpus"):
        needed = int(marker.args[0])
    if needed and num_gpus() < needed:
        reason = f"needs {needed} CUDA device(s), this machine has {num_gpus()}"
        if os.environ.get("UF_REQUIRE_GPU") == "1":
            pytest.fail(f"{reason}, and UF_REQUIRE_GPU=1 forbids skipping", pytrace=False)
        pytest.skip(reason)
