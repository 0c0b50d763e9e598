"""A golden folder (`ckpt/`, `expected/`) as arrays; its format stands in tests/golden/README.md.

bf16 tensors become float32 arrays (exact). This file knows where things are, not what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.model import Model

Array = npt.NDArray[Any]

_DTYPES = {"F32": "<f4", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "BF16": "<u2"}


class GoldenError(Exception):
    """A golden folder that cannot be read or lacks something."""


class Tensors(dict[str, Array]):
    """The tensors of one file; a missing one is reported with the file's name."""

    def __init__(self, path: Path) -> None:
        """Read the whole file.

        Raises:
            GoldenError: when it cannot be read or is no safetensors file.
        """
        super().__init__(_read_safetensors(path))
        self._path = path

    def __missing__(self, key: str) -> Array:
        raise GoldenError(f"{self._path} has no tensor {key!r}: was it written in another format?")


@dataclass
class Golden:
    """One golden folder, opened."""

    folder: Path
    model: Model
    prompts: tuple[int, ...]
    _files: dict[str, Tensors] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Golden:
        """Open a folder and read what every check needs.

        Raises:
            GoldenError: when the folder, one of its two halves or `meta.json` is missing or wrong.
            ultraflash.graphs.errors.ConfigError: when the checkpoint's configuration does not work.
        """
        for part in (folder, folder / "ckpt", folder / "expected"):
            if not part.is_dir():
                raise GoldenError(
                    f"{part} is not a folder: give a golden folder, which holds ckpt/ and expected/"
                )
        meta = _read_json(folder / "expected" / "meta.json")
        prompts = meta.get("prompt_lengths") if isinstance(meta, dict) else None
        if not isinstance(prompts, list) or not all(isinstance(p, int) and p > 0 for p in prompts):
            raise GoldenError(f"{folder}/expected/meta.json lacks the list prompt_lengths")
        if not prompts:
            raise GoldenError(f"{folder}/expected/meta.json names no prompt: nothing to compare")
        return cls(folder, Model.from_checkpoint(folder / "ckpt"), tuple(prompts))

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder / "ckpt"

    def has(self, name: str) -> bool:
        """Whether `expected/` holds this file (a stem means a safetensors file)."""
        return self._path(name).is_file()

    def stems(self, start: str) -> list[str]:
        """Stems of the safetensors files that begin with `start`, sorted."""
        return sorted(p.stem for p in (self.folder / "expected").glob(f"{start}*.safetensors"))

    def tensors(self, stem: str) -> Tensors:
        """The tensors of `expected/{stem}.safetensors`, read once."""
        if stem not in self._files:
            self._files[stem] = Tensors(self._path(stem))
        return self._files[stem]

    def json(self, name: str) -> Any:
        """The parsed `expected/{name}`."""
        return _read_json(self._path(name))

    def prompt(self, length: int) -> list[int]:
        """The ids of the prompt of this length."""
        return ids_of(self.tensors("prompts")[f"prompt.P{length}"])

    def decode(self, length: int) -> list[int]:
        """The ids to feed after that prompt, one a step."""
        return ids_of(self.tensors("prompts")[f"decode.P{length}"])

    def longest(self) -> int:
        """Positions that the longest sequence of any check takes."""
        ends = [p + len(self.decode(p)) for p in self.prompts]
        if self.has("greedy"):
            greedy = self.tensors("greedy")
            ends += [p + len(greedy[f"P{p}.ids"]) for p in self.prompts if f"P{p}.ids" in greedy]
        return max(ends)

    def _path(self, name: str) -> Path:
        return self.folder / "expected" / (name if "." in name else name + ".safetensors")


def ids_of(array: Array | Sequence[int]) -> list[int]:
    """Token ids as plain integers."""
    return [int(i) for i in array]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GoldenError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GoldenError(f"{path} is not JSON: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Array]:
    try:
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header: dict[str, dict[str, Any]] = json.loads(raw[8:start])
        header.pop("__metadata__", None)
        return {name: _tensor(raw, start, info) for name, info in header.items()}
    except OSError as error:
        raise GoldenError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GoldenError(f"{path} is damaged or no safetensors file: {error!r}") from error


def _tensor(raw: bytes, start: int, info: dict[str, Any]) -> Array:
    first, last = info["data_offsets"]
    values = np.frombuffer(raw[start + first : start + last], _DTYPES[info["dtype"]])
    if info["dtype"] == "BF16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.reshape(info["shape"])
