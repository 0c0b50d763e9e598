"""The server's gunicorn settings, with the fake engine behind them."""

from __future__ import annotations

import sys
from pathlib import Path

from ultraflash.server import gunicorn_conf
from ultraflash.server.gunicorn_conf import *  # noqa: F403

gunicorn_conf.supervisor_argv = (
    sys.executable,
    str(Path(__file__).with_name("fake_supervisor.py")),
)
