"""The README names what exists, and all of the switches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ultraflash.runtime.config import SWITCHES
from ultraflash.server.config import SETTINGS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Set by the server for its own processes, and by make for the tests.
INTERNAL = {"UF_LISTEN_FD", "UF_RUN_DIR"}
TESTS_ONLY = {"UF_REQUIRE_GPU"}


def test_every_switch_is_listed() -> None:
    listed = set(re.findall(r"`(UF_[A-Z_]+)`", README))
    exist = {switch.name for switch in SWITCHES} | {setting.name for setting in SETTINGS}
    assert listed == (exist - INTERNAL) | TESTS_ONLY


def test_every_verb_exists() -> None:
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", README, re.MULTILINE)) <= verbs


@pytest.mark.parametrize(
    "path",
    sorted(set(re.findall(r"`((?:\.ci|docs|graphs|runtime|server|tests|tools)/[^`*]*)`", README))),
)
def test_every_named_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"ultraflash\.(\w+(?:\.\w+)?)\b", README))))
def test_every_named_program_exists(name: str) -> None:
    path = ROOT / name.replace(".", "/")
    assert path.is_dir() or path.with_suffix(".py").is_file()
