"""An engine for the tests of this room: opened once, idle at the start and the end of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import device
from helpers.engines import assert_no_slot_is_lost, open_engine
from ultraflash.runtime import Engine


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def _opened(engine_cache: Path) -> Engine:
    return open_engine(engine_cache)


@pytest.fixture
def engine(_opened: Engine) -> Iterator[Engine]:
    assert not _opened.has_work
    yield _opened
    _opened.close()
    assert_no_slot_is_lost(_opened)


@pytest.fixture(
    scope="module", params=["numpy", pytest.param(device.BACKEND, id="gpu", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Tests that ask for it run in NumPy, and once more on the device where there is one."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all engines: compiled kernels are shared."""
    return tmp_path_factory.mktemp("cache")
