"""What the engine asks of a backend: compile plans, run them, read and write named buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from ultraflash.graphs.plan import Plan
from ultraflash.runtime.errors import DeviceError

Array = npt.NDArray[Any]
Bytes = bytes | memoryview  # a memoryview of unsigned bytes that nobody writes to


class Rows(NamedTuple):
    """Rows [start, end) of a slot's state buffer."""

    name: str
    start: int
    end: int


def check_size(rows: Sequence[Rows], expected: int, found: int) -> None:
    """Whether bytes fill rows.

    Raises:
        DeviceError: when they do not.
    """
    if found != expected:
        names = ", ".join(f"{r.name} {r.start} to {r.end}" for r in rows[:3])
        raise DeviceError(
            f"{len(rows)} stretches of state ({names}, ...) have {expected} bytes, {found} were "
            f"given"
        )


class Staged(Protocol):
    """State on its way to the host, as it was when it was asked for."""

    def wait(self, seconds: float | None = None) -> bool:
        """Whether all of it has arrived, after at most `seconds`; None: however long it takes."""

    def take(self) -> Bytes:
        """The bytes, waited for.

        Raises:
            EngineError: when the copy failed.
        """


class Runner(Protocol):
    """One compiled plan. Its io and scratch buffers are its own; state and weights belong to the
    backend.
    """

    @property
    def plan(self) -> Plan:
        """The plan that `run` executes."""

    def run(self, span: slice | None = None) -> None:
        """Execute the nodes of the plan, or only those of `span`, on every rank."""

    def prepare(self) -> None:
        """Do now what the first launch to a place would do otherwise; runs nothing.

        Raises:
            EngineError: when memory does not suffice.
        """

    def launch(self, place: int = 0) -> None:
        """Begin to execute the plan with what io holds now, behind what was launched before. The
        record comes to `place`, where nobody needs the one before any more.
        """

    def wait(self, place: int = 0) -> None:
        """Return when the latest launch to `place` is done; its record is read from now on. Io may
        be written when nothing is under way; of one place, when nothing is on its way to that one.
        """

    @property
    def times_ns(self) -> tuple[int, int]:
        """When the launch that was waited for last began and ended, by the runner's clock."""

    def read(self, name: str, rank: int = 0) -> Array:
        """A buffer's contents as the reference operations see them (bf16 as float32). Not to be
        written to.
        """

    def write(self, name: str, value: Array, place: int | None = None) -> None:
        """Replace a buffer's contents on every rank. An io buffer: before launches to every place,
        or to one, to which nothing may be under way then.
        """


class Backend(Protocol):
    """Weights and state of one model on one kind of machine."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    @property
    def places(self) -> int:
        """Places that runners have for io, 1 or 2: as many launches of one may be under way."""

    @property
    def arch(self) -> str:
        """What it runs on: "cpu", or a GPU architecture such as "sm_90a"."""

    def facts(self) -> dict[str, Any]:
        """What, beside plans and weights, decides the bits of results; part of the fingerprint."""

    def compile(self, plan: Plan) -> Runner:
        """Make a plan executable; its state buffers are allocated, zeroed, when first named.

        Raises:
            EngineError: when a weight is missing or misshapen, or a buffer was known with another
            shape.
        """

    def clear_slot(self, slot: int) -> None:
        """Zero every state buffer of a slot."""

    def read_state(self, name: str, slot: int, start: int, end: int) -> Array:
        """A copy of rows [start, end) of a slot's state buffer, in its own type; the ranks hold the
        same. [end - start, ...].

        Raises:
            EngineError: when no plan has named such a buffer.
        """

    def write_state(self, name: str, slot: int, start: int, rows: Array) -> None:
        """Put rows into a slot's state buffer from row `start` on, on every rank.

        Raises:
            EngineError: when no plan has named such a buffer.
        """

    def stage(self, slot: int, parts: Sequence[tuple[bytes, Sequence[Rows]]]) -> list[Staged]:
        """Begin to bring rows of a slot to the host: of each part a head, then the rows one behind
        the other, in their own types. Steps that follow may overwrite them.

        Raises:
            EngineError: when no plan has named such a buffer.
        """

    def restore(self, slot: int, parts: Sequence[tuple[Sequence[Rows], Bytes]]) -> None:
        """Put bytes that `stage` brought, without their heads, back into rows of a slot, on every
        rank. The bytes may go afterwards; steps that follow see the rows.

        Raises:
            EngineError: when no plan has named such a buffer, or rows and bytes differ in size.
        """
