"""The device, opened once a module, and figures printed behind the results."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from helpers.device import REPORT
from helpers.device_group import APART, SHARED, why_not
from helpers.device_ops import Ops, open_ops
from helpers.device_weights import Shelf

SILENCE_S = 60


@pytest.fixture(scope="module")
def ops() -> Ops:
    """Runs single operations."""
    return open_ops()


@pytest.fixture(scope="session")
def shelf() -> Shelf:
    """Weights of single operations."""
    return Shelf()


@pytest.fixture(scope="module", params=[SHARED, APART])
def where(request: pytest.FixtureRequest) -> str:
    """Where two ranks stand; skips with its reason where they cannot."""
    place: str = request.param
    if reason := why_not(place, 2):
        pytest.skip(reason)
    return place


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A test that takes longer than any should ends the run and says where it was."""
    faulthandler.dump_traceback_later(SILENCE_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section("figures")
        for line in REPORT:
            terminalreporter.line(line)
