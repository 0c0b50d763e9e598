"""The device, opened once a module, and figures printed behind the results."""

from __future__ import annotations

import pytest

from helpers.device import REPORT
from helpers.device_ops import Ops, open_ops
from helpers.device_weights import Shelf


@pytest.fixture(scope="module")
def ops() -> Ops:
    """Runs single operations."""
    return open_ops()


@pytest.fixture(scope="session")
def shelf() -> Shelf:
    """Weights of single operations."""
    return Shelf()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section("figures")
        for line in REPORT:
            terminalreporter.line(line)
