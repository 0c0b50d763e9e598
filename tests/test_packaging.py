"""What an installed ultraflash holds, and what its maker's verbs say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("ptx", "graphs", "runtime", "kvshare", "server", "tools")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = SETTINGS["tool"]["setuptools"]["packages"]
FOLDERS = SETTINGS["tool"]["setuptools"]["package-dir"]


def _in_the_tree() -> dict[str, str]:
    """Package name -> folder, for every folder of a room that holds an `__init__.py`."""
    folders = [
        init.parent.relative_to(ROOT)
        for room in ROOMS
        for init in ROOT.glob(f"{room}/**/__init__.py")
    ]
    return {f"ultraflash.{'.'.join(folder.parts)}": folder.as_posix() for folder in folders}


def test_package_list_is_the_tree() -> None:
    tree = _in_the_tree()
    assert sorted(PACKAGES) == sorted(tree)
    assert tree == FOLDERS


def test_every_python_file_lies_in_a_package() -> None:
    tree = set(_in_the_tree().values())
    stray = [
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in ROOT.glob(f"{room}/**/*.py")
        if path.parent.relative_to(ROOT).as_posix() not in tree
    ]
    assert stray == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy, since setuptools leaves its work beside what it reads."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    for room in ROOMS:
        if (ROOT / room / "__init__.py").exists():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / room, copy / room, ignore=skip)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(copy / "out"), str(copy)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = (copy / "out").glob("*.whl")
    return zipfile.Path(built)


def test_wheel_holds_the_rooms_and_nothing_else(wheel: zipfile.Path) -> None:
    top = {entry.name for entry in wheel.iterdir() if not entry.name.endswith(".dist-info")}
    assert top == {"ultraflash"}
    rooms = {entry.name for entry in wheel.joinpath("ultraflash").iterdir()}
    assert rooms == {name.split(".")[1] for name in PACKAGES}


def test_wheel_holds_every_file_the_program_reads(wheel: zipfile.Path) -> None:
    inside = set(wheel.root.namelist())
    checkout = Path(str(wheel.root.filename)).parent.parent
    files = {
        path.relative_to(checkout).as_posix()
        for folder in FOLDERS.values()
        for path in (checkout / folder).rglob("*")
        if path.is_file() and path.suffix not in {".sh", ".csv"}
    }
    assert {file for file in files if f"ultraflash/{file}" not in inside} == set()


def test_bare_make_lists_every_verb() -> None:
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    verbs = set(phony.split()) - {"help", "run-venv"}
    done = subprocess.run(["make", "-C", ROOT], check=True, capture_output=True, text=True)
    assert verbs == set(re.findall(r"^make ([\w-]+)", done.stdout, re.MULTILINE))


def _fake_pythons(folder: Path, script: str) -> None:
    for name in ("python3", *(f"python3.{minor}" for minor in range(11, 15))):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


OLD = """case "$*" in *"%d.%d"*) echo 3.9;; *) exit 1;; esac"""
BARE = """case "$*" in *ensurepip*) exit 1;; *"%d.%d"*) echo 3.11;; esac"""


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (OLD, "needs Python 3.11 or newer and found .*python3 is 3.9: .* python3.11-venv"),
        (BARE, "has no venv module: install the package python3.11-venv"),
    ],
)
def test_a_missing_python_is_named_in_one_sentence(
    tmp_path: Path, script: str, sentence: str
) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "venv.sh", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    fakes = tmp_path / "bin"
    fakes.mkdir()
    _fake_pythons(fakes, script)
    done = subprocess.run(
        ["sh", "tools/venv.sh", "run"],
        cwd=tmp_path,
        env={"PATH": f"{fakes}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(sentence, done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
