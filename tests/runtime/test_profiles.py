"""Where the width rule starts: one machine's row, thresholds for each block."""

from __future__ import annotations

import pytest

from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.profiles import BLOCKS, MACHINES, Machine, fixed_thresholds, select_profile


def test_the_last_two_thresholds_are_halved_and_quartered() -> None:
    assert fixed_thresholds(0.3, 5) == pytest.approx((0.3, 0.3, 0.3, 0.15, 0.075))
    assert fixed_thresholds(0.2, 7) == pytest.approx((0.2, 0.2, 0.2, 0.2, 0.2, 0.1, 0.05))


@pytest.mark.parametrize(
    ("arch", "world", "row_world", "threshold"),
    [
        ("sm_103a", 4, 4, 0.3),
        ("sm_103a", 8, 8, 0.2),
        ("sm_100a", 8, 8, 0.2),
        ("sm_90a", 1, 4, 0.3),
        ("sm_90a", 6, 4, 0.3),
        ("sm_90a", 16, 8, 0.2),
        ("cpu", 1, 1, 0.2),
        ("cpu", 4, 1, 0.2),
    ],
)
def test_a_machine_takes_the_nearest_row_that_is_not_larger(
    arch: str, world: int, row_world: int, threshold: float
) -> None:
    profile = select_profile(arch, world)
    assert (profile.machine.arch, profile.machine.world) == (arch, row_world)
    assert profile.block == len(profile.thresholds) == 5
    assert profile.thresholds[0] == threshold


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m.arch}-{m.world}")
@pytest.mark.parametrize("block", BLOCKS)
def test_every_row_gives_rising_positive_times_and_falling_thresholds(
    machine: Machine, block: int
) -> None:
    profile = select_profile(machine.arch, machine.world, block)
    times = profile.step_ms(16)
    assert len(times) == 16
    assert times[0] > 0
    assert list(times) == sorted(times)
    assert times[6] == pytest.approx(machine.step_ms)
    assert len(profile.thresholds) == block
    assert list(profile.thresholds) == sorted(profile.thresholds, reverse=True)


def test_what_no_profile_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no width profile for arch sm_80: add a row"):
        select_profile("sm_80", 8)
    with pytest.raises(ConfigError, match="draft block 4 is not one of 5, 6, 7"):
        select_profile("cpu", 1, 4)
