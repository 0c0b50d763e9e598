"""One GPU as one rank of a world: the configuration at full size, synthetic weights, a conversation
that was never had.

What is measured on it is a *shard step, emulated*: exchanges between ranks go through this GPU's
own memory, with a latency that is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Life, Plan
from ultraflash.graphs.release import release_model
from ultraflash.graphs.step import Build
from ultraflash.runtime.backends import cuda_backend
from ultraflash.runtime.config import RuntimeConfig, prepare_cache_dir
from ultraflash.runtime.errors import ConfigError
from ultraflash.runtime.plans import Plans
from ultraflash.runtime.step_io import write_constants
from ultraflash.runtime.weights.index import CheckpointIndex

if TYPE_CHECKING:
    from ultraflash.runtime.gpu.backend import CudaBackend
    from ultraflash.runtime.gpu.driver import Device
    from ultraflash.runtime.gpu.runner import CudaRunner

SLOT, SLOTS = 1, 2
_PAGE = 2 << 20  # what the driver hands memory out in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, which weights, which rank of which world."""
    parser.add_argument(
        "--config",
        choices=("full", "checkpoint"),
        default="checkpoint",
        help="sizes of the released model, or those of --checkpoint (default)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder with a checkpoint (default: the bundled tiny model)",
    )
    parser.add_argument(
        "--weights",
        choices=("checkpoint", "synthetic"),
        default="checkpoint",
        help="real ones, or plausible random codes made on the GPU (default: checkpoint)",
    )
    parser.add_argument("--world", type=int, default=1, metavar="W", help="ranks (default: 1)")
    parser.add_argument(
        "--rank", type=int, default=0, metavar="R", help="which of them this GPU is (default: 0)"
    )
    parser.add_argument(
        "--hop-us",
        type=float,
        default=2.0,
        metavar="US",
        help="latency of an exchange between ranks (default: %(default)s; world 1 has none)",
    )
    parser.add_argument(
        "--block", type=int, metavar="B", help="rows of a draft block, 0 = none (default: trained)"
    )


def positions(text: str) -> tuple[int, ...]:
    """The numbers of "1k,8k,1M": tokens in front of a step.

    Raises:
        argparse.ArgumentTypeError: naming the part that is none.
    """
    found = []
    for part in text.split(","):
        digits, factor = part.rstrip("kM"), {"k": 1 << 10, "M": 1 << 20}.get(part[-1:], 1)
        if not digits.isdecimal() or len(part) - len(digits) > 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not like 1000, 8k or 1M")
        found.append(int(digits) * factor)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Shard:
    """A rank with its weights on the device; `plans` compiles and runs its steps."""

    model: Model
    build: Build
    config: RuntimeConfig
    backend: CudaBackend
    plans: Plans
    name: str
    synthetic: bool
    rank: int
    hop_us: float
    free_before: int

    @property
    def device(self) -> Device:
        """The GPU."""
        return self.backend.device

    @property
    def title(self) -> str:
        """What every table of figures has to say first."""
        world = self.build.world
        if world == 1:
            what = "one GPU"
        else:
            what = (
                f"rank {self.rank} of {world}: SHARD STEP, EMULATED "
                f"(exchanges loop back, {self.hop_us:g} us each)"
            )
        weights = "SYNTHETIC weights" if self.synthetic else "checkpoint"
        return f"{self.device.name}; {self.name}, {weights}; {what}; block {self.build.block}"

    def compile(self, plan: Plan) -> CudaRunner:
        """A plan of its own, that `close` gives back."""
        runner = self.backend.compile(plan)
        write_constants(runner)
        return runner

    def decode_runner(self, rows: int) -> CudaRunner:
        """The engine's own runner of a step of one conversation."""
        from ultraflash.runtime.gpu.runner import CudaRunner

        runner = self.plans.decode_runner(rows, 1)
        assert isinstance(runner, CudaRunner)
        return runner

    def fill_state(self, plan: Plan) -> None:
        """Every slot holds a whole context of random entries, windows and pending rows."""
        from ultraflash.runtime.gpu.synthetic import fill_state

        refs = [(ref, self.backend.state(ref)) for ref in plan.of_life(Life.STATE)]
        fill_state(refs, self.model, self.device, self.config.cache_dir)

    def memory(self, plans: Iterable[Plan]) -> tuple[int, int]:
        """Bytes that weights and these plans were predicted to take, and that are taken."""
        from ultraflash.runtime.gpu.driver import memory

        return predicted_bytes(list(plans), self.build.world), self.free_before - memory()[0]


def open_shard(options: argparse.Namespace, max_seq: int, prefill: str = "full") -> Shard:
    """Take a GPU and put a rank's weights on it, for contexts up to `max_seq` tokens.

    Raises:
        ConfigError: for arguments that do not go together.
        GraphError: when the model cannot be split so, or its config.json is incomplete.
        EngineError: when there is no such GPU, or its memory does not suffice.
    """
    if options.config == "full" and options.weights != "synthetic":
        raise ConfigError("--config full has no files: add --weights synthetic")
    if not 0 <= options.rank < options.world:
        raise ConfigError(f"--rank {options.rank} is none of world {options.world}: 0 is the first")
    if options.world > 1 and options.weights != "synthetic":
        raise ConfigError(
            f"world {options.world} on one GPU exchanges nothing real: add --weights synthetic"
        )
    config = RuntimeConfig.from_env(checkpoint=options.checkpoint, draft_block=options.block)
    config = replace(config, eager=False, check=False, trace=None, prefill=prefill)
    full = options.config == "full"
    model = release_model() if full else Model.from_checkpoint(config.checkpoint)
    if max_seq > model.max_position:
        raise ConfigError(f"--context {max_seq} is more than the model's {model.max_position}")
    capacity = Capacity(SLOTS, max_seq)
    build = Build(model, capacity, options.world, config.block(model))
    model.check_world(options.world)
    backend, free = _opened(options, config, build)
    name = "released model" if full else config.checkpoint.name
    return Shard(
        model, build, config, backend, Plans(build, backend, config), name,
        options.weights == "synthetic", options.rank, options.hop_us, free,
    )  # fmt: skip


def _opened(
    options: argparse.Namespace, config: RuntimeConfig, build: Build
) -> tuple[CudaBackend, int]:
    cuda_backend()  # says what is missing where the bindings are
    from ultraflash.runtime.gpu.backend import CudaBackend
    from ultraflash.runtime.gpu.driver import Device, memory
    from ultraflash.runtime.gpu.synthetic import place_weights

    prepare_cache_dir(config)
    if options.weights == "checkpoint":
        index = CheckpointIndex.open(config.checkpoint)
        Device.open(config.gpus[0])
        free = memory()[0]
        return CudaBackend.open(config, index, build.model), free
    device = Device.open(config.gpus[0])
    free = memory()[0]
    plan = build_decode(build, build.block + 1, 1)  # names every weight, drafts' included
    weights = place_weights(plan, build.model, device, config.cache_dir, options.rank)
    if options.world == 1:
        return CudaBackend(device, weights, config.cache_dir), free
    rank = {"world": options.world, "rank": options.rank, "hop_us": options.hop_us}
    return CudaBackend.emulated(device, weights, config.cache_dir, **rank), free


def predicted_bytes(plans: list[Plan], world: int) -> int:
    """What plans say that they take on the device: weights, state, and each one's scratch and
    io, room for exchanges and for state that moves.

    Large allocations end at the next page of the driver, small ones share pages.
    """
    from ultraflash.runtime.gpu.arena import Arena
    from ultraflash.runtime.gpu.copies import LANE_BYTES, LANES
    from ultraflash.runtime.gpu.exchange import inbox_bytes
    from ultraflash.runtime.gpu.synthetic import resident_bytes

    named = {ref.name: ref for plan in plans for ref in plan.buffers.values()}.values()
    weights = resident_bytes([ref for ref in named if ref.life is Life.WEIGHT], world)
    sizes = [weights, inbox_bytes(world) if world > 1 else 0, *[LANE_BYTES] * LANES]
    sizes += [ref.nbytes for ref in named if ref.life is Life.STATE]
    for plan in plans:
        sizes += [Arena.of(plan).size, sum(ref.nbytes for ref in plan.of_life(Life.IO))]
    large = sum(-(-size // _PAGE) * _PAGE for size in sizes if size >= _PAGE // 2)
    return large + sum(size for size in sizes if size < _PAGE // 2)
