"""Where the width rule starts on each machine: draft block, fixed thresholds, plausible step times.

A profile is the starting point of the adaptive rule and the whole of the fixed rule (runtime/
width.py). Thresholds are compared with survivals, the chance that a draft and all before it are
accepted. The last two positions have a half and a quarter of the threshold, as in the reference
engine.

Sources of the table:
    published   deepseek-ultrafast (Baseten): threshold 0.3 on 4 GB300 and 0.2 on 8 B300; block 6
                there, 7 on 8 B200, 5 on 4 B200; steps of 3.30 ms and 2.71 ms with 7 rows. B200
                takes thresholds and times of the same number of B300, since its memory is as fast.
    derived     a draft is worth its row while its survival exceeds (time of a row) * (accepted
                tokens + 1) / (time of a step). The roofline gives 0.13 and 0.07 ms a row on B300,
                which makes 0.31 and 0.21 of the published steps; on H200 0.24 and 0.12 ms a row
                with steps of 4.5 and 3.4 ms make 0.30 and 0.20.
    measured    the interpreter on two cores with the bundled checkpoint: 50 ms for one row, 4 ms
                for each further one, which makes 0.2.

Only ratios of times matter: the rule multiplies a row's cost by the rate of the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultraflash.runtime.errors import ConfigError

BLOCKS = (5, 6, 7)
DEFAULT_BLOCK = 5  # as the draft stages were trained
BENCHMARK_BLOCK = 6  # as the published single-stream speeds were taken
CPU = "cpu"
_ROWS = 7  # rows of the step whose time the table gives


@dataclass(frozen=True)
class Machine:
    """A row of the table. Units: `step_ms` with 7 rows, `row_ms` for each row more or less."""

    arch: str
    world: int
    threshold: float
    reference_block: int
    step_ms: float
    row_ms: float
    source: str


MACHINES = (
    Machine("sm_103a", 4, 0.3, 6, 3.30, 0.13, "published"),
    Machine("sm_103a", 8, 0.2, 6, 2.71, 0.07, "published"),
    Machine("sm_100a", 4, 0.3, 5, 3.30, 0.13, "published"),
    Machine("sm_100a", 8, 0.2, 7, 2.71, 0.07, "published"),
    Machine("sm_90a", 4, 0.3, 5, 4.50, 0.24, "derived"),
    Machine("sm_90a", 8, 0.2, 5, 3.40, 0.12, "derived"),
    Machine(CPU, 1, 0.2, 5, 74.0, 4.0, "measured"),
)


@dataclass(frozen=True)
class Profile:
    """What a server of this machine and block starts with."""

    machine: Machine
    block: int
    thresholds: tuple[float, ...]

    def step_ms(self, max_rows: int) -> tuple[float, ...]:
        """Plausible times of steps with 1 .. max_rows rows, ms, until they are measured."""
        m = self.machine
        return tuple(m.step_ms + (rows - _ROWS) * m.row_ms for rows in range(1, max_rows + 1))


def select_profile(arch: str, world: int, block: int = DEFAULT_BLOCK) -> Profile:
    """The profile of a machine: its arch's row with the largest world that is not larger than this
    one, else its smallest.

    Raises:
        ConfigError: for an arch without a row, or a block that the draft stages do not run.
    """
    if block not in BLOCKS:
        raise ConfigError(f"draft block {block} is not one of 5, 6, 7: use {DEFAULT_BLOCK}")
    rows = sorted((m for m in MACHINES if m.arch == arch), key=lambda m: m.world)
    if not rows:
        known = ", ".join(dict.fromkeys(m.arch for m in MACHINES))
        raise ConfigError(f"no width profile for arch {arch}: add a row to {known} in profiles.py")
    machine = next((m for m in reversed(rows) if m.world <= world), rows[0])
    return Profile(machine, block, fixed_thresholds(machine.threshold, block))


def fixed_thresholds(threshold: float, block: int) -> tuple[float, ...]:
    """A threshold for each draft position; the last two are halved and quartered."""
    return (*(threshold,) * (block - 2), threshold / 2, threshold / 4)
