"""A fake driver in the place of the real one, on any machine."""

from __future__ import annotations

import pytest

from helpers.fake_cuda import FakeCuda
from ultraflash.runtime.gpu import driver


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(driver, "cu", fake)
    return fake
