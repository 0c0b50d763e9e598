"""Writing checkpoints in the official layout: safetensors shards of limited size, and their index.

Streams: a tensor's bytes are asked for when its turn comes, so that tables larger than memory pass
through. Takes storage dtypes as they are (FP8, E8M0, packed FP4), which stock writers refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultraflash.graphs.checkpoint import DTYPE_BYTES, TensorSpec, tensor_bytes
from ultraflash.runtime.weights.index import INDEX_FILE

Source = Callable[[str], npt.NDArray[Any]]
_CHUNK_BYTES = 1 << 24


def write_checkpoint(
    folder: Path,
    specs: dict[str, TensorSpec],
    source: Source,
    shard_bytes: int,
    wrote: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write all of `specs` in their order, `source(name)` giving the stored values of each.

    A shard holds at most `shard_bytes`, or one larger tensor. `wrote` hears every number of bytes
    written. An existing index is replaced last, so that a reader sees a whole checkpoint or none.
    """
    shards = list(_split(specs, shard_bytes))
    placed: dict[str, str] = {}
    paths = []
    for number, names in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(path, {name: specs[name] for name in names}, source, wrote)
        placed |= dict.fromkeys(names, path.name)
        paths.append(path)
    total = sum(map(tensor_bytes, specs.values()))
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: placed[name] for name in specs},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=0) + "\n", encoding="utf-8")
    return paths


def _split(specs: dict[str, TensorSpec], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, spec in specs.items():
        size = tensor_bytes(spec)
        if names and held + size > shard_bytes:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names


def _write_shard(
    path: Path,
    specs: dict[str, TensorSpec],
    source: Source,
    wrote: Callable[[int], None] | None,
) -> None:
    # Widest items first: then every tensor starts at a multiple of its item size.
    order = sorted(specs, key=lambda name: (-DTYPE_BYTES[specs[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in order:
        spec, end = specs[name], position + tensor_bytes(specs[name])
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            values = source(name)
            if values.shape != specs[name].shape or values.nbytes != tensor_bytes(specs[name]):
                raise ValueError(f"{name}: got {values.dtype} {values.shape}, need {specs[name]}")
            for chunk in _chunks(values):
                stream.write(chunk.data)
                if wrote:
                    wrote(chunk.nbytes)


def _chunks(values: npt.NDArray[Any]) -> Iterable[npt.NDArray[Any]]:
    """The bytes in order, a few megabytes at a time: a mapped slice is never copied as a whole."""
    rows = max(1, _CHUNK_BYTES // max(1, values.nbytes // max(1, len(values))))
    for start in range(0, len(values), rows):
        yield np.ascontiguousarray(values[start : start + rows])
