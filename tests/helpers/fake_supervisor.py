"""The supervisor with the fake engine's process as its child."""

from __future__ import annotations

import sys
from pathlib import Path

from ultraflash.server import supervisor

_ENGINE = Path(__file__).with_name("fake_engine.py")

if __name__ == "__main__":
    spec = supervisor.ChildSpec("engine", (sys.executable, str(_ENGINE)))
    raise SystemExit(supervisor.main(specs=[spec]))
