"""One line an item, a summary at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ultraflash.tools.golden.measure import Verdict


@dataclass(frozen=True)
class Item:
    """What became of one item; `ratio` is error / limit (0 for a skipped or exact one)."""

    name: str
    status: str
    ratio: float
    text: str


class Report:
    """Collects items and prints each as it comes; `only` keeps names that contain the text."""

    def __init__(self, write: Callable[[str], object], only: str = "") -> None:
        """`write` takes one line without its end."""
        self.items: list[Item] = []
        self._write = write
        self._only = only

    def wants(self, name: str) -> bool:
        """Whether an item is asked for: ask before expensive work."""
        return self._only in name

    def wants_any(self, stem: str, keys: Iterable[str]) -> bool:
        """Whether any item of a file is asked for."""
        return any(self.wants(f"{stem} {key}") for key in keys)

    def add(self, name: str, verdict: Verdict) -> None:
        """Report a comparison."""
        ratio = verdict.error / verdict.limit if verdict.limit else 0.0
        self._line(
            name,
            "PASS" if verdict.ok else "FAIL",
            f"error {_number(verdict.error):>8}  limit {_number(verdict.limit):>7}",
            verdict.note,
            ratio,
        )

    def fail(self, name: str, reason: str) -> None:
        """Report an item that the engine could not even compute."""
        self._line(name, "FAIL", f"error {'none':>8}  limit {'':>7}", reason)

    def skip(self, name: str, reason: str) -> None:
        """Report an item that was not compared, and why."""
        self._line(name, "SKIP", f"error {'':>8}  limit {'':>7}", reason)

    def count(self, status: str) -> int:
        """Number of items with this status."""
        return sum(item.status == status for item in self.items)

    def summary(self, seconds: float) -> str:
        """Counts, the item nearest to its limit, reasons of skips, names of failures."""
        lines = [
            f"{self.count('PASS')} passed, {self.count('FAIL')} failed, "
            f"{self.count('SKIP')} skipped in {seconds:.1f} s"
        ]
        passed = [item for item in self.items if item.status == "PASS"]
        if passed:
            nearest = max(passed, key=lambda item: item.ratio)
            lines.append(f"nearest to its limit: {nearest.name}, {nearest.ratio:.0%} of it")
        reasons = Counter(item.text for item in self.items if item.status == "SKIP")
        lines += [f"skipped {n}: {reason}" for reason, n in reasons.items()]
        lines += [f"failed: {item.name}" for item in self.items if item.status == "FAIL"]
        return "\n".join(lines)

    def _line(self, name: str, status: str, numbers: str, note: str, ratio: float = 0.0) -> None:
        if not self.wants(name):
            return
        self.items.append(Item(name, status, ratio, note))
        self._write(f"{name:<46} {numbers}  {status}  {note}".rstrip())


def _number(value: float) -> str:
    if math.isfinite(value) and value == int(value):
        return str(int(value))
    return f"{value:.2g}"
