"""What the engine asks of a backend: compile plans, run them, read and write named buffers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from ultraflash.graphs.plan import Plan

Array = npt.NDArray[Any]


class Runner(Protocol):
    """One compiled plan. Its io and scratch buffers are its own; state and weights belong to the
    backend.
    """

    @property
    def plan(self) -> Plan:
        """The plan that `run` executes."""

    def run(self, span: slice | None = None) -> None:
        """Execute the nodes of the plan, or only those of `span`, on every rank."""

    def launch(self) -> None:
        """Begin to execute the plan with what io holds now, behind what was launched before."""

    def wait(self) -> None:
        """Return when what was launched is done; io may then be read and written."""

    def read(self, name: str, rank: int = 0) -> Array:
        """A buffer's contents as the reference operations see them (bf16 as float32). Not to be
        written to.
        """

    def write(self, name: str, value: Array) -> None:
        """Replace a buffer's contents on every rank."""


class Backend(Protocol):
    """Weights and state of one model on one kind of machine."""

    @property
    def world(self) -> int:
        """Number of ranks."""

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
