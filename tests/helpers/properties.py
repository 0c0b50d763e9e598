"""Settings of property tests: the same examples on every machine, no deadline on busy cores."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow]


def examples(count: int) -> settings:
    """Decorate a `@given` test with this: `count` examples, derived from the test alone."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=_SLOW_IS_FINE
    )
