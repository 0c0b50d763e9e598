"""The supervisor with the fake engine's process as its child, or `UF_TEST_ENGINE`'s."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ultraflash.server import supervisor

_ENGINE = Path(__file__).with_name(os.environ.get("UF_TEST_ENGINE") or "fake_engine.py")

if __name__ == "__main__":
    spec = supervisor.ChildSpec("engine", (sys.executable, str(_ENGINE)))
    raise SystemExit(supervisor.main(specs=[spec]))
