"""The promises of conftest.py: hardware that is missing skips, or fails where it was demanded."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from helpers.devices import num_gpus


@pytest.mark.gpu
def test_marked_tests_run_only_with_a_gpu() -> None:
    assert num_gpus() >= 1


@pytest.mark.skipif(num_gpus() > 0, reason="has a GPU")
def test_a_demanded_gpu_fails_instead_of_skipping() -> None:
    target = f"{__file__}::test_marked_tests_run_only_with_a_gpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", target],
        env={**os.environ, "UF_REQUIRE_GPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "needs 1 CUDA device(s), this machine has 0, and UF_REQUIRE_GPU=1" in done.stdout


def test_the_seed_is_the_tests_own(seed: int, rng: np.random.Generator) -> None:
    assert seed == 3228384672431856280, "a seed that moves hides failures"
    assert rng.integers(2**32) == np.random.default_rng(seed).integers(2**32)
