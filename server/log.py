"""How this room's processes log: one line an event, on stdout; stderr is for fatal errors."""

from __future__ import annotations

import logging
import sys


def configure_logging() -> None:
    """Send every `ultraflash` logger to stdout; to be called once, where a process begins."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("ultraflash")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
