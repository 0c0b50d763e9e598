"""Plans as text and as sums, of files and of the released model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.rig import TINY
from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.checkpoint import expected_tensors, tensor_bytes
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.tools import show_plan


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert show_plan.main([str(a) for a in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def number_after(text: str, label: str, column: int) -> int:
    """A cell of a summary's tables, by its row's first word."""
    (line,) = [line for line in text.splitlines() if line.strip("│ ").startswith(f"{label} ")]
    return int(line.strip("│").split("│")[column].replace(",", ""))


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ((), lambda m: build_decode(Build(m, Capacity(5, m.max_position)), 1, 1)),
        (
            ("--rows", "6", "--sequences", "3", "--world", "2"),
            lambda m: build_decode(Build(m, Capacity(5, m.max_position), world=2), 6, 3),
        ),
        (
            ("--kind", "prefill"),
            lambda m: build_prefill(Build(m, Capacity(5, m.max_position)), 128),
        ),
        (
            ("--kind", "prefill", "--rows", "16", "--context", "99", "--max-sequences", "1"),
            lambda m: build_prefill(Build(m, Capacity(2, 99)), 16),
        ),
    ],
    ids=["default", "decode", "prefill", "prefill of a small server"],
)
def test_the_text_is_the_plan(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], plan: Callable[[Model], Plan]
) -> None:
    assert shown(capsys, TINY, *arguments) == plan(Model.from_checkpoint(TINY)).text()


def test_the_bundled_model_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    assert text.startswith("plan decode rows=1 sequences=1 world=1\n")
    assert "L0.attn.attend" in text


@pytest.mark.parametrize("world", [1, 8])
def test_a_summary_adds_up(capsys: pytest.CaptureFixture[str], world: int) -> None:
    text = shown(capsys, "--release", "--rows", "6", "--world", str(world), "--summary")
    model = release_model()
    plan = build_decode(Build(model, Capacity(5, model.max_position), world=world), 6, 1)
    assert f"digest {plan.digest()}" in text.splitlines()
    assert number_after(text, "total", 1) == len(plan.nodes)
    assert number_after(text, "total", 2) == plan.cost().nbytes
    assert number_after(text, "total", 4) == plan.cost().flops
    for life in Life:
        refs = plan.of_life(life)
        assert number_after(text, life.value, 1) == len(refs)
        assert number_after(text, life.value, 2) == sum(ref.nbytes for ref in refs)
    operations = {type(node.op).__name__ for node in plan.nodes}
    assert sum(number_after(text, op, 1) for op in operations) == len(plan.nodes)
    assert sum(number_after(text, op, 2) for op in operations) == plan.cost().nbytes


def release_plan(rows: int, context: int) -> Plan:
    return build_decode(Build(release_model(), Capacity(2, context)), rows, 1)


def test_the_release_reads_every_tensor_of_the_backbone() -> None:
    """From names alone: what a plan's weights take is what the checkpoint stores for them.

    Rotary tables, token map and hash constants are computed, drafts and vision are not run here.
    """
    stored = sum(
        tensor_bytes(spec)
        for name, spec in expected_tensors(release_model()).items()
        if name.startswith(("layers.", "embed.", "head.", "norm."))
    )
    weights = release_plan(1, 1024).of_life(Life.WEIGHT)
    computed = ("rope.plain", "rope.compressed", "engram.token_map")
    constants = ("multipliers", "primes", "offsets")
    read = sum(
        ref.nbytes
        for ref in weights
        if ref.name not in computed and not ref.name.endswith(constants)
    )
    assert read == stored


def test_the_release_moves_what_was_published() -> None:
    """Model.md section 9: 13.03 GB of weights for one row, of which experts are 4.512 GB."""
    plan = release_plan(1, 1024)
    experts = [n.op.cost().nbytes for n in plan.nodes if "Experts" in type(n.op).__name__]
    assert sum(experts) == pytest.approx(4.512e9, rel=0.002)
    assert plan.cost().nbytes == pytest.approx(13.03e9 + 8.8e6, rel=0.005)
    # As many experts as rows can choose at most, where the table there expects 34.62 of 36.
    six = release_plan(6, 1024)
    experts = [n.op.cost().nbytes for n in six.nodes if "Experts" in type(n.op).__name__]
    assert sum(experts) == pytest.approx(26.04e9 * 36 / 34.62, rel=0.003)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--world", "3"), ["world 3 does not divide", "can be split over [1, 2]"]),
        (("--world", "0"), ["at least 1"]),
        (("--rows", "0"), ["--rows must be at least 1, got 0"]),
        (("--rows", "2", "--sequences", "3"), ["--sequences 3", "--rows 2"]),
        (("--kind", "prefill", "--sequences", "2"), ["1 sequence", "--sequences 2"]),
        (("--context", "-5"), ["--context must be at least 1, got -5"]),
        (("--max-sequences", "0"), ["--max-sequences must be at least 1, got 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals_are_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    assert show_plan.main([str(TINY), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("show_plan: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.mark.parametrize("folder", ["nothing here", "a file"])
def test_no_checkpoint_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: str
) -> None:
    (tmp_path / "a file").write_text("x")
    assert show_plan.main([str(tmp_path / folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        show_plan.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples", "--release --rows 6 --world 8 --summary", "fingerprint", "one rank"):
        assert word in text


def test_a_pager_may_close_early() -> None:
    """`show_plan --release | head -1` ends without a word."""
    command = [sys.executable, "-W", "error", "-m", "ultraflash.tools.show_plan", "--release"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("plan decode")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0
