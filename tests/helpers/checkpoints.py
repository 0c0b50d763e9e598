"""Checkpoints on disk for tests: copies of the bundled one, and ways to damage them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ultraflash.graphs.model import Model
from ultraflash.runtime.config import BUNDLED_CHECKPOINT
from ultraflash.runtime.weights import CheckpointIndex

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny-a"


def bundled_model() -> Model:
    return Model.from_checkpoint(BUNDLED_CHECKPOINT)


def copy_bundled(folder: Path) -> Path:
    """A writable copy of the bundled checkpoint in `folder`/ckpt."""
    return Path(shutil.copytree(BUNDLED_CHECKPOINT, folder / "ckpt"))


def poke(folder: Path, tensor: str, position: int, value: int) -> None:
    """Set one stored byte of a tensor."""
    info = CheckpointIndex.open(folder).tensors[tensor]
    with info.file.open("r+b") as stream:
        stream.seek(info.offset + position)
        stream.write(bytes([value]))


def edit_json(path: Path, *keys: str, value: Any) -> None:
    """Set a nested value of a JSON file."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    node = tree
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")


def write_raw(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **overrides: Any) -> None:
    """One safetensors file of (dtype word, stored array); `overrides` replace header entries."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, values) in tensors.items():
        end = position + values.nbytes
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [position, end]}
        position = end
    header |= overrides
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for _, values in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
