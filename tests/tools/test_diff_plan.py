"""Which buffer differs first: between two interpreters of which one is wrong, and on a fake GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.compiler import no_compiler
from helpers.fake_cuda import FakeCuda
from helpers.ops import scratch
from helpers.rig import TINY
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan, Ref
from ultraflash.graphs.step import Build
from ultraflash.runtime.backend import Array
from ultraflash.runtime.interpret import NumpyBackend
from ultraflash.runtime.step_io import Draw, Part, write_constants, write_step
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.load import load_weights
from ultraflash.tools import diff_plan


class NumpyTwin:
    """A second interpreter; `spoil` changes what a node has written."""

    def __init__(self, backend: NumpyBackend, plan: Plan, spoil: dict[str, Callable]) -> None:
        self._runner, self._spoil, self.plan = backend.compile(plan), spoil, plan
        self.runs = 0

    def run(self, span: slice | None = None) -> None:
        self._runner.run(span)
        self.runs += 1
        for node in self.plan.nodes[span or slice(None)]:
            for ref in node.op.writes():
                if ref.name in self._spoil:
                    value = self._runner.read(ref.name).copy()
                    self._spoil[ref.name](value)
                    self._put(ref, value)

    times_ns = 0, 0

    def prepare(self) -> None:
        """Nothing is put off."""

    def launch(self, place: int = 0) -> None:
        self.run()

    def wait(self, place: int = 0) -> None:
        """Nothing: `launch` has done it."""

    def read(self, name: str, rank: int = 0) -> Array:
        return self._runner.read(name)

    def write(self, name: str, value: Array, place: int | None = None) -> None:
        self._runner.write(name, value, place)

    def write_state(self, ref: Ref, value: Array) -> None:
        self._runner.read(ref.name)[...] = value

    def poison(self, ref: Ref) -> None:
        """Nothing: an interpreter makes its buffers anew."""

    def _put(self, ref: Ref, value: Array) -> None:
        (self.write_state(ref, value) if ref.life is Life.STATE else self.write(ref.name, value))


def compared(
    spoil: dict[str, Callable] | None = None, label: str = "", free: bool = False
) -> tuple[list[diff_plan.Difference], int]:
    """A step of two rows whose second side spoils some buffers, and how often that side ran."""
    model = Model.from_checkpoint(TINY)
    weights = load_weights(CheckpointIndex.open(TINY), model, 1)
    plan = build_decode(Build(model, Capacity(2, 64), block=model.draft_block), 2, 1)
    ours = NumpyBackend(weights).compile(plan)
    theirs = NumpyTwin(NumpyBackend(weights), plan, spoil or {})
    for runner in (ours, theirs):
        write_constants(runner)
        write_step(runner, [Part(0, 0, [7, 8], Draw(1.0, 0.9, 40, 7, 3))])
    return list(diff_plan.compare(plan, ours, theirs, label, free=free)), theirs.runs


def bad(differences: list[diff_plan.Difference]) -> list[str]:
    return [d.ref.name for d in differences if d.verdict == "DIFFERS"]


def add_one(value: Array) -> None:
    value += 1


def nudge(value: Array) -> None:
    value *= np.float32(1 + 2**-8)


@pytest.mark.parametrize("free", [False, True])
def test_equal_sides_are_equal_to_the_bit(free: bool) -> None:
    differences, runs = compared(free=free)
    assert {d.verdict for d in differences} == {"same"}
    assert len(differences) > runs > 400


def test_a_wrong_node_is_the_only_one_that_differs() -> None:
    """All others get the right inputs."""
    differences, _ = compared({"L3.attn.wo_a": add_one})
    assert bad(differences) == ["L3.attn.wo_a"]


def test_running_freely_the_difference_goes_on() -> None:
    differences, _ = compared({"L3.attn.wo_a": add_one}, free=True)
    found = bad(differences)
    assert found[0] == "L3.attn.wo_a"
    assert len(found) > 50


def test_rounding_is_close_and_no_difference() -> None:
    differences, _ = compared({"L3.attn.wo_a": nudge})
    assert bad(differences) == []
    assert [d.ref.name for d in differences if d.verdict == "close"] == ["L3.attn.wo_a"]


def test_a_wrong_integer_and_a_wrong_state_are_differences() -> None:
    differences, _ = compared({"io.token": add_one, "L0.attn.ring_codes": add_one})
    assert bad(differences) == ["L0.attn.ring_codes", "io.token"]


def test_only_the_nodes_of_a_label() -> None:
    differences, runs = compared(label="L3.attn")
    labels = {d.label for d in differences}
    assert all(label == "L3.attn" or label.startswith("L3.attn.") for label in labels)
    assert 5 < runs < 60


@pytest.mark.parametrize(
    ("got", "want", "verdict"),
    [
        ([1.0, 2.0], [1.0, 2.0], "same"),
        ([1.0, 2.0], [1.0, 2.01], "close"),
        ([1.0, 2.0], [1.0, 2.1], "DIFFERS"),
        ([1.0, -np.inf], [1.0, -np.inf], "same"),
        ([1.0, np.nan], [1.0, np.nan], "same"),
        ([1.0, np.nan], [1.0, 2.0], "DIFFERS"),
        ([1.0, np.inf], [1.0, 2.0], "DIFFERS"),
        ([1.0, 2.0], [1.0, -np.inf], "DIFFERS"),
        ([-np.inf, -np.inf], [-np.inf, -np.inf], "same"),
        ([0.0, 0.0], [0.0, 0.0], "same"),
        ([0.0, -0.0], [0.0, 0.0], "same"),
        ([0.0, 1e-3], [0.0, 0.0], "close"),
    ],
)
def test_verdicts_on_floats(got: list[float], want: list[float], verdict: str) -> None:
    found = diff_plan.difference(
        3, "n", scratch("x", 2, dtype="f32"), np.array(got, np.float32), np.array(want, np.float32)
    )
    assert found.verdict == verdict


def test_verdicts_on_integers() -> None:
    ref = scratch("x", 3, dtype="i32")
    same = diff_plan.difference(3, "n", ref, np.arange(3), np.arange(3))
    other = diff_plan.difference(3, "n", ref, np.arange(3), np.array([0, 1, 3]))
    assert (same.verdict, other.verdict, other.unequal) == ("same", "DIFFERS", 1)
    assert str(other).split()[:4] == ["DIFFERS", "3", "n", "x[3]:i32"]


@pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
def test_on_a_gpu_whose_kernels_do_nothing_everything_differs(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, kernels: Path
) -> None:
    """Poison shows what was not written, io included."""
    arguments = [str(TINY), "--rows", "2", "--length", "140", "--block", "0"]  # two chunks
    assert diff_plan.main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"\d+ buffers: \d+ equal to the bit, \d+ differ, first step.follow in .*", lines[-1]
    )
    assert any("io.token" in line for line in lines)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((str(TINY),), "there is no NVIDIA driver"),
        ((str(TINY), "--rows", "0"), "--rows and --length must be at least 1, got 0 and 37"),
        ((str(TINY), "--length", "300"), "300 and --rows 4 are 304 tokens, this model has 256 "),
        ((str(TINY), "--rows", "7", "--temperature", "1"), "verify 6 drafts and a block has 5: "),
        (("/nowhere",), "/nowhere"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], cuda: FakeCuda, arguments: tuple[str, ...], words: str
) -> None:
    cuda.library = False
    assert diff_plan.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("diff_plan: ")
    assert err.count("\n") == 1
    assert words in err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        diff_plan.main(["--help"])
    text = capsys.readouterr().out
    for word in ("examples", "--free", "--label L4.attn", "poison"):
        assert word in text
