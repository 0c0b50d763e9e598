"""Names of the golden items for parts of the model that are not built yet.

Whoever builds one gives its section a `check` in `check_golden.SECTIONS`, and the function here
goes.
"""

from __future__ import annotations

from ultraflash.tools.golden.data import Golden


def resize_items(golden: Golden) -> list[str]:
    """One item for each set of vision settings."""
    return [f"resize_plans {k}" for k in sorted(golden.json("resize_plans.json")) if k != "fields"]


def vision_items(golden: Golden) -> list[str]:
    """The tower on each picture, and each prompt with pictures in it."""
    return [f"vision {k}" for k in sorted({key.split(".")[0] for key in golden.tensors("vision")})]
