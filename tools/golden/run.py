"""What every check gets, and the frame that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ultraflash.graphs.errors import GraphError
from ultraflash.runtime.errors import EngineError
from ultraflash.tools.golden.data import Golden
from ultraflash.tools.golden.limits import Limits
from ultraflash.tools.golden.probe import GoldenProbe, missing
from ultraflash.tools.golden.report import Report


@dataclass(frozen=True)
class Run:
    """One comparison of an engine with a golden folder."""

    golden: Golden
    probe: GoldenProbe
    limits: Limits
    report: Report


@dataclass(frozen=True)
class Section:
    """Items that belong together.

    `file` must exist in `expected/` and the probe must have the methods in `needs`, else the
    section is skipped. A section that is not built has no `check`; `items` then names what is
    skipped for `reason`.
    """

    name: str
    file: str
    needs: tuple[str, ...] = ()
    check: Callable[[Run], None] | None = None
    items: Callable[[Golden], list[str]] | None = None
    reason: str = ""


def run_section(run: Run, section: Section) -> None:
    """Run or skip one section; an engine error inside it is a failed item, not the end."""
    golden, report = run.golden, run.report
    lacking = missing(run.probe, section.needs)
    if not golden.has(section.file):
        report.skip(section.name, f"expected/ has no {section.file}")
    elif section.check is None:
        for item in section.items(golden) if section.items else [section.name]:
            report.skip(item, section.reason)
    elif lacking:
        report.skip(section.name, f"the engine offers no {', '.join(lacking)}")
    else:
        try:
            section.check(run)
        except (EngineError, GraphError) as error:
            report.fail(section.name, f"{type(error).__name__}: {error}")
