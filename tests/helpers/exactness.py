"""How long a test may look: CI takes the quick size, `make exactness` (UF_EXACTNESS=1) the long
one."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
LONG = os.environ.get("UF_EXACTNESS") == "1"


def sized(quick: T, long: T) -> T:
    """The size of this run."""
    return long if LONG else quick
