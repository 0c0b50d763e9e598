"""Widths, architectures and models as the tools around kernels understand them."""

from __future__ import annotations

import argparse
import re

import pytest

from helpers.rig import TINY
from ultraflash.graphs.capacity import Capacity
from ultraflash.runtime.errors import ConfigError
from ultraflash.tools import gpu_arguments


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4", (4,)),
        ("1,2,4", (1, 2, 4)),
        ("1..8", tuple(range(1, 9))),
        ("1..3,7", (1, 2, 3, 7)),
        ("2,1..3", (2, 1, 3)),
        ("16", (16,)),
    ],
)
def test_counts(text: str, found: tuple[int, ...]) -> None:
    assert gpu_arguments.counts(text) == found


@pytest.mark.parametrize("text", ["", "x", "1..", "..3", "-1", "1-8", "1,,2", "1.5", "1...8"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"{text!r} is not like 4, or")):
        gpu_arguments.counts(text)


@pytest.mark.parametrize("text", ["0", "17", "1..17", "0..3", "5..4"])
def test_counts_that_no_step_has(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must lie between 1 and 16"):
        gpu_arguments.counts(text)


def test_architectures() -> None:
    assert gpu_arguments.architectures("sm_103a,sm_90a,sm_103a") == ("sm_103a", "sm_90a")
    with pytest.raises(argparse.ArgumentTypeError, match="'sm_80' is unknown, kernels exist for"):
        gpu_arguments.architectures("sm_90a,sm_80")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu_arguments.add_checkpoint(parser, release=True)
    return parser.parse_args(arguments)


def test_a_build_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UF_DRAFT_BLOCK", raising=False)
    options = parsed("--checkpoint", str(TINY))
    build = gpu_arguments.chosen_build(options, gpu_arguments.settings(options))
    assert build.model.vocab == 512
    assert (build.capacity, build.block) == (Capacity(5, build.model.max_position), 5)
    options = parsed("--release", "--block", "7", "--context", "4096")
    build = gpu_arguments.chosen_build(options, gpu_arguments.settings(options), world=8)
    assert (build.model.hidden, build.world) == (5120, 8)
    assert (build.capacity, build.block) == (Capacity(5, 4096), 7)


def test_a_context_beyond_the_models() -> None:
    options = parsed("--release", "--context", "2000000")
    with pytest.raises(ConfigError, match="--context 2000000 is more than the model's 1048576"):
        gpu_arguments.chosen_build(options, gpu_arguments.settings(options))
