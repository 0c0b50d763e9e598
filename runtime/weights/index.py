"""What is in a checkpoint folder: name, dtype, shape and place of every tensor, from headers alone.

Reads safetensors headers itself, because stock loaders refuse FP8, E8M0 and packed FP4. Opening
checks that files and headers agree with each other; `verify` checks them against a model. Nothing
here decodes a value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ultraflash.graphs.checkpoint import TensorSpec, expected_tensors
from ultraflash.graphs.model import Model
from ultraflash.runtime.errors import WeightsError
from ultraflash.runtime.weights.table import cut_specs

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_FILE = "shard.json"

_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
# What `raw` hands out: bytes for everything that NumPy has no type for.
_STORAGE = {"BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1", "F8_E8M0": "u1", "I8": "u1"}
_MAX_HEADER_BYTES = 100_000_000
_SAMPLE_BYTES = 4096
_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What `shard.json` of a pre-sharded folder says; `common` holds what every rank maps."""

    world: int
    rank: int
    source: str
    common: str | None


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of one folder, by name."""

    folder: Path
    tensors: dict[str, TensorInfo]
    shard: Shard | None = None

    @classmethod
    def open(cls, folder: Path) -> CheckpointIndex:
        """Read the headers of every shard.

        Raises:
            WeightsError: when a file is missing, truncated or no safetensors file, or when the
                index and the shards disagree; names file and sizes.
        """
        shard = _read_shard(folder)
        tensors = _read_folder(folder)
        if shard and shard.common:
            tensors |= _read_folder(folder / shard.common)
        return cls(folder, tensors, shard)

    @property
    def total_bytes(self) -> int:
        """Tensor bytes of all files together."""
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds tensors, in order of name."""
        return tuple(sorted({t.file for t in self.tensors.values()}))

    @cached_property
    def _maps(self) -> dict[Path, npt.NDArray[np.uint8]]:
        # One a file: a mapping for each tensor would exceed the system's limit of 65,530.
        return {file: np.memmap(file, np.uint8, "r") for file in self.files}

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The stored values, memory-mapped, read-only: u1 for F8 and I8, u2 for BF16, f4 for F32.

        Raises:
            WeightsError: when there is no such tensor, or its dtype is none of the above.
        """
        info = self.tensors.get(name)
        if info is None:
            raise WeightsError(f"{self.folder} has no tensor {name}")
        if info.dtype not in _STORAGE:
            raise WeightsError(f"{name} has dtype {info.dtype}, known are {', '.join(_STORAGE)}")
        # Not a slice and a view: those refuse offsets that are no multiple of the item size.
        return np.ndarray(info.shape, _STORAGE[info.dtype], self._maps[info.file], info.offset)

    def verify(self, model: Model) -> None:
        """Compare names, dtypes and shapes with what the model must have.

        Raises:
            WeightsError: one for everything that is wrong, a line for each tensor.
        """
        expected = expected_tensors(model)
        if self.shard:
            expected = cut_specs(model, self.shard.world)
        problems = _differences(expected, self.tensors)
        if problems:
            raise WeightsError(
                f"{self.folder} does not fit its config.json, {len(problems)} of "
                f"{len(expected)} tensors are wrong; fetch the files again or correct the "
                "configuration:\n" + "\n".join("  " + problem for problem in problems)
            )


def weights_digest(index: CheckpointIndex) -> str:
    """A cheap, stable digest: every name, dtype, shape and size, and a sample of each file's bytes.

    Files up to 16 MiB count whole; of larger ones 64 evenly spaced pages, so that 510 GB take a few
    seconds. It tells checkpoints apart; it does not prove that no bit has rotted.
    """
    digest = blake3()
    for name, info in sorted(index.tensors.items()):
        digest.update(f"{name}\0{info.dtype}\0{info.shape}\0{info.nbytes}\n".encode())
    for file in index.files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if size <= 1 << 24:
                digest.update(stream.read())
                continue
            for step in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * step // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return str(digest.hexdigest())


def _differences(expected: dict[str, TensorSpec], found: dict[str, TensorInfo]) -> list[str]:
    lines = [f"missing     {name}" for name in expected if name not in found]
    lines += [f"unexpected  {name}" for name in found if name not in expected]
    for name, spec in expected.items():
        info = found.get(name)
        if info is None:
            continue
        if info.shape != spec.shape:
            lines.append(f"misshapen   {name}: {list(info.shape)} instead of {list(spec.shape)}")
        if info.dtype != spec.dtype:
            lines.append(f"wrong type  {name}: {info.dtype} instead of {spec.dtype}")
    return lines


def _read_folder(folder: Path) -> dict[str, TensorInfo]:
    path = folder / INDEX_FILE
    if not path.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise WeightsError(
                f"{folder} holds neither {INDEX_FILE} nor {SINGLE_FILE}: "
                f"give the folder of an official-layout checkpoint"
            )
        return _read_header(single)

    index = _read_json(path)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise WeightsError(f"{path} has no weight_map of names to files: fetch it again")
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(placed.values())):
        if Path(file).name != file:
            raise WeightsError(f"{path} names the file {file!r}, which is not directly in {folder}")
        for name, info in _read_header(folder / file).items():
            if name in tensors:
                raise WeightsError(f"{name} is in both {tensors[name].file.name} and {file}")
            tensors[name] = info
    _compare_with_map(path, placed, tensors)
    total = index.get("metadata", {}).get("total_size")
    held = sum(t.nbytes for t in tensors.values())
    if total is not None and total != held:
        raise WeightsError(
            f"{path} says total_size {total} but its shards hold {held} tensor bytes: "
            f"index and shards are not of the same checkpoint"
        )
    return tensors


def _compare_with_map(path: Path, placed: dict[str, str], found: dict[str, TensorInfo]) -> None:
    wrong = [
        f"  {name}: in {found[name].file.name if name in found else 'no shard'}, index says {file}"
        for name, file in placed.items()
        if name not in found or found[name].file.name != file
    ]
    wrong += [
        f"  {n}: in {t.file.name}, not in the index" for n, t in found.items() if n not in placed
    ]
    if wrong:
        raise WeightsError(
            f"{path} disagrees with its shards about {len(wrong)} tensors; fetch it again:\n"
            + "\n".join(wrong)
        )


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise WeightsError(
                    f"{file} is no safetensors file: it has {size} bytes and announces a header of "
                    f"{length}; fetch it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror}): fetch it again") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{file} has a damaged header ({error}): fetch it again") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{file} has a header that is no JSON object: fetch it again")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _entry(file, start, name, entry) for name, entry in header.items()}
    _check_extent(file, size, start, tensors)
    return tensors


def _entry(file: Path, start: int, name: str, entry: Any) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        needed = math.prod(shape) * _BYTES[dtype]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{file} describes {name} in an unknown way: {entry!r}") from error
    if not sound or end - begin != needed:
        raise WeightsError(
            f"{file} gives {name} {end - begin} bytes, {dtype} {list(shape)} needs {needed}"
        )
    return TensorInfo(name, dtype, shape, file, start + begin, needed)


def _check_extent(file: Path, size: int, start: int, tensors: dict[str, TensorInfo]) -> None:
    """Tensors must fill the file without holes and overlaps."""
    position = start
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if info.offset != position:
            raise WeightsError(
                f"{file} places {info.name} at byte {info.offset} where {position} comes next: "
                f"its header is damaged, fetch it again"
            )
        position += info.nbytes
    if position != size:
        state = "truncated" if size < position else "too long"
        raise WeightsError(
            f"{file} is {state}: it has {size} bytes, its header describes {position}; "
            f"fetch it again"
        )


def _read_shard(folder: Path) -> Shard | None:
    path = folder / SHARD_FILE
    if not path.exists():
        return None
    value = _read_json(path)
    try:
        shard = Shard(value["world"], value["rank"], value["source"], value["common"])
    except KeyError as error:
        raise WeightsError(f"{path} lacks {error}: write the shards again") from error
    if not 0 <= shard.rank < shard.world:
        raise WeightsError(
            f"{path} says rank {shard.rank} of {shard.world}: write the shards again"
        )
    return shard


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is not JSON ({error}): fetch it again") from error
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({error.strerror})") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} should hold a JSON object: fetch it again")
    return value
