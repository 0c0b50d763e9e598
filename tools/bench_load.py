"""Time how weights get onto a GPU: against reading the files, and against copying to the device.

Without --checkpoint a synthetic one is written first, as large as --gb asks: matrices as large as
the release's, fewer layers and experts, random codes. Files are read once before the clock starts,
so that they lie in the page cache. The engine's own loading (checks and layouts included) is set
against two others, measured in the same run: plain reading by one thread, then plain copying, which
is what a simple loader takes; and reading with all cores, then copying, which a better one might.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from tokenizers import Tokenizer

from ultraflash.graphs.checkpoint import TensorSpec, expected_tensors, tensor_bytes
from ultraflash.graphs.errors import GraphError
from ultraflash.graphs.model import Model
from ultraflash.runtime.backends import cuda_backend
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.errors import ConfigError, EngineError
from ultraflash.runtime.weights.device import Check, Progress, upload_weights
from ultraflash.runtime.weights.index import CheckpointIndex
from ultraflash.runtime.weights.layout import Relayout
from ultraflash.runtime.weights.write import write_checkpoint
from ultraflash.tools.load_weights import SHARD_BYTES, meter
from ultraflash.tools.make_tiny import TINY, completed, write_settings
from ultraflash.tools.tiny_tokenizer import tokenizer_json

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.driver import Device

_CHUNK_BYTES = 64 << 20
_WIDE = replace(
    TINY, hidden=5120, heads=64, head_dim=512, rope_dim=64, q_rank=1280, o_groups=8, o_rank=1024,
    window=128, index_heads=32, index_dim=128, expert_width=2304, active_experts=6,
    engram_base=100_000, engram_heads=8, engram_dim=256, draft_markov_rank=256, vision_layers=0,
)  # fmt: skip
_EXAMPLES = """\
examples, each after python -m ultraflash.tools.bench_load:
  --gb 12 --folder /tmp            write 12 GB there, measure, remove them
  --checkpoint DIR --times 5       what is there; best of five
"""


def wide_model(gb: float) -> Model:
    """A model with the release's matrices whose checkpoint has about `gb` GB.

    Raises:
        ConfigError: when that is less than it has with the fewest experts.
    """
    few, more = (replace(_WIDE, experts=n, draft_experts=n) for n in (8, 9))
    sizes = [sum(map(tensor_bytes, expected_tensors(m).values())) for m in (few, more)]
    experts = 8 + int((gb * 1e9 - sizes[0]) / (sizes[1] - sizes[0]))
    if experts < 8:
        raise ConfigError(f"--gb must be at least {sizes[0] / 1e9:.1f}, got {gb}")
    return replace(_WIDE, experts=experts, draft_experts=experts)


class Filling:
    """Plausible stored values by name, cut from a few random blocks."""

    def __init__(self, specs: dict[str, TensorSpec]) -> None:
        """Blocks of a few MB."""
        self._specs, rng = specs, np.random.default_rng(0)
        size = 1 << 23
        codes = rng.integers(0, 256, size).astype(np.uint8)
        codes[(codes & 127) == 127] = 126  # no NaN
        values = rng.normal(0, 0.02, size // 4).astype(np.float32)
        self._blocks: dict[str, npt.NDArray[Any]] = {
            "F8_E4M3": codes,
            "I8": codes,
            "F8_E8M0": rng.integers(114, 124, size).astype(np.uint8),
            "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
            "F32": values,
        }

    def __call__(self, name: str) -> npt.NDArray[Any]:
        """The values of one tensor."""
        spec = self._specs[name]
        block = np.roll(self._blocks[spec.dtype], zlib.crc32(name.encode()) % 1000)
        return np.resize(block, spec.shape)


def write_wide(folder: Path, gb: float, console: Console) -> None:
    """A synthetic checkpoint of about `gb` GB."""
    text = tokenizer_json(_WIDE.vocab)
    model = completed(wide_model(gb), Tokenizer.from_str(text))
    specs = expected_tensors(model)
    write_settings(folder, model, text)
    with meter(console, "writing", sum(map(tensor_bytes, specs.values()))) as advance:
        write_checkpoint(folder, specs, Filling(specs), SHARD_BYTES, advance)


def read_files(files: Sequence[Path], buffers: Sequence[npt.NDArray[np.uint8]]) -> float:
    """Seconds to read all files, piece by piece, by a thread for each buffer."""
    free: SimpleQueue[npt.NDArray[np.uint8]] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def read(piece: tuple[int, int]) -> None:
        buffer = free.get()
        os.preadv(piece[0], [buffer.data], piece[1])
        free.put(buffer)

    with ExitStack() as stack:
        opened = [(stack.enter_context(file.open("rb")), file.stat().st_size) for file in files]
        pieces = [
            (stream.fileno(), at)
            for stream, size in opened
            for at in range(0, size, len(buffers[0]))
        ]
        started = time.perf_counter()
        with ThreadPoolExecutor(len(buffers)) as pool:
            list(pool.map(read, pieces))
        return time.perf_counter() - started


def measure(device: Device, config: RuntimeConfig, times: int, console: Console) -> float:
    """Print all of them; the share of plain reading and copying that loading reaches.

    Raises:
        EngineError: when the checkpoint does not fit the GPU.
    """
    from ultraflash.runtime.gpu.driver import Pinned, Stream, allocate, release

    index = CheckpointIndex.open(config.checkpoint)
    model = Model.from_checkpoint(config.checkpoint)
    total = index.total_bytes
    console.print(f"{device.name}; {total:,} bytes in {len(index.files)} files")
    pinned, stream = [Pinned(_CHUNK_BYTES) for _ in range(os.cpu_count() or 1)], Stream()
    buffers = [one.bytes for one in pinned]
    read_files(index.files, buffers[:1])
    alone = best(times, lambda: read_files(index.files, buffers[:1]))
    reading = best(times, lambda: read_files(index.files, buffers))
    room = allocate(_CHUNK_BYTES, "a buffer")

    def copy() -> float:
        started = time.perf_counter()
        for at in range(0, total, _CHUNK_BYTES):
            stream.copy_in(room, pinned[0].address, min(_CHUNK_BYTES, total - at))
        stream.wait()
        return time.perf_counter() - started

    copying = best(times, copy)
    release(room)
    for one in pinned:
        one.close()
    loads = []
    for _ in range(times):
        with meter(console, "loading", total) as advance:
            loads.append(load(device, config, index, model, steps(advance)))
    loading = min(loads)
    for what, seconds in (
        ("reading, one thread", alone),
        (f"reading, {len(pinned)} threads", reading),
        ("copying", copying),
        ("loading", loading),
    ):
        console.print(f"{what}: {seconds:.2f} s, {total / seconds / 1e9:.1f} GB/s")
    console.print("loading, one by one: " + ", ".join(f"{s:.2f} s" for s in loads))
    plain = (alone + copying) / loading
    console.print(
        f"plain reading and copying / loading = {plain:.2f}; "
        f"{(reading + copying) / loading:.2f} where {len(pinned)} threads read"
    )
    return plain


def load(
    device: Device, config: RuntimeConfig, index: CheckpointIndex, model: Model, progress: Progress
) -> float:
    """Seconds that the engine takes from an open checkpoint to weights in their places."""
    from ultraflash.runtime.gpu.driver import release
    from ultraflash.runtime.gpu.uploader import Uploader

    placed: list[int] = []
    started = time.perf_counter()
    with Uploader(device, config.cache_dir) as uploader:

        def place(
            name: str,
            parts: Sequence[npt.NDArray[Any]],
            layout: type[Relayout] | None = None,
            check: Check | None = None,
        ) -> int:
            placed.append(uploader.place(name, parts, layout, check))
            return placed[-1]

        upload_weights(index, model, place, progress, config.cache_dir)
    seconds = time.perf_counter() - started
    for address in placed:
        release(address)
    return seconds


def best(times: int, act: Callable[[], float]) -> float:
    """The shortest of several runs, in seconds."""
    return min(act() for _ in range(times))


def steps(advance: Callable[[int], None]) -> Callable[[int, int], None]:
    """Turns what has been done so far into what has been done since."""
    before = 0

    def progress(done: int, _: int) -> None:
        nonlocal before
        advance(done - before)
        before = done

    return progress


def _opened(ordinal: int) -> Device:
    cuda_backend()  # says what is missing without the bindings
    from ultraflash.runtime.gpu.driver import Device

    return Device.open(ordinal)


@contextmanager
def checkpoint(options: argparse.Namespace, console: Console) -> Iterator[Path]:
    """The one that was named, or a synthetic one for as long as it is needed."""
    if options.checkpoint:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="ultraflash-", dir=options.folder) as folder:
        write_wide(Path(folder), options.gb, console)
        yield Path(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a measurement, 1 with one sentence on stderr, also when too slow."""
    parser = argparse.ArgumentParser(
        prog="python -m ultraflash.tools.bench_load",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="an existing checkpoint")
    parser.add_argument("--gb", type=float, default=12.0, help="of the synthetic one (default 12)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where it is written")
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default 0)")
    parser.add_argument("--times", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--least", type=float, default=0.0, help="fail below this share")
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error(f"--times must be at least 1, got {options.times}")
    console = Console(soft_wrap=True)
    try:
        config = replace(RuntimeConfig.from_env(), gpus=(options.gpu,), backend="cuda")
        prepare_cache_dir(config)
        device = _opened(options.gpu)  # before anything is written for it
        with checkpoint(options, console) as folder:
            share = measure(device, replace(config, checkpoint=folder), options.times, console)
    except (EngineError, GraphError, OSError) as error:
        print(f"bench_load: {error}", file=sys.stderr)
        return 1
    if share < options.least:
        print(f"bench_load: {share:.2f} is less than {options.least}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
