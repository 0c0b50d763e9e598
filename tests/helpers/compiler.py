"""Whether kernels can be compiled here, and which ones plans need."""

from __future__ import annotations

from collections.abc import Iterable

from ultraflash.graphs.plan import Node, Plan
from ultraflash.runtime.errors import ConfigError


def no_compiler() -> str:
    """Why nothing can be compiled; "" where the NVRTC wheel and its bindings are installed."""
    try:
        from ultraflash.runtime.gpu import nvrtc

        nvrtc.version()
    except (ImportError, ConfigError) as error:
        return f"no kernel compiler: {error}"
    return ""


def device_nodes(plans: Iterable[Plan]) -> list[Node]:
    """All nodes, of all plans."""
    return [node for plan in plans for node in plan.nodes]
