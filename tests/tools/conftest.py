"""For tools that compile: they find the kernels that other tests have compiled."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def kernels(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that the tools will use."""
    monkeypatch.setenv("UF_CACHE_DIR", str(kernel_cache))
    return kernel_cache
