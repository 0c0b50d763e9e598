"""What a collective's kernel gets beside its buffers: where every rank receives, and its own place.

Its use, and why nothing is lost or overtaken: ptx/uf/exchange.cuh.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

from ultraflash.graphs.exchange import PIECE
from ultraflash.graphs.ops.all_reduce import AllReduce
from ultraflash.graphs.plan import Op
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.gpu.driver import Address, allocate, fill

MAX_WORLD = 8  # ranks that a kernel's arguments have room for
_STAGES = 3
_WORD_BYTES = 4
DECLARATION = f"""\
struct Exchange {{
    u32* inbox[{MAX_WORLD}];
    int rank;
    int world;
    int stage;
    int capacity;
    int hop_ns;
}};
"""


@dataclass(frozen=True)
class Exchange:
    """One rank's view of its world; addresses are of inboxes u32 [3, world, PIECE]."""

    inboxes: tuple[Address, ...]  # of rank 0, 1, ...
    rank: int
    hop_ns: int = 0  # how long a message is kept under way, where nobody else is there
    emulated: bool = False

    @classmethod
    def between(cls, inboxes: tuple[Address, ...]) -> list[Exchange]:
        """The views of the ranks that receive there."""
        check_world(len(inboxes))
        return [cls(inboxes, rank) for rank in range(len(inboxes))]

    @classmethod
    def loop_back(cls, world: int, rank: int, hop_us: float) -> Exchange:
        """One rank of `world` on the current GPU with nobody else there.

        It sends as much as ever, all of it into its own inbox: what rank r should get arrives as
        if r had sent it. So a sum is `world` times the rank's own part (in slices: the sum of its
        own slices), which means nothing.

        Raises:
            DeviceError: when there is no such rank, or the delay is no time.
        """
        check_world(world)
        if not 0 <= rank < world:
            raise DeviceError(f"there is no rank {rank} in a world of {world}")
        if not 0 <= hop_us <= 1e6:
            raise DeviceError(f"a hop takes 0 to 1,000,000 us, got {hop_us}")
        own = inbox(world)
        place = PIECE * _WORD_BYTES  # kernels write behind `inbox`, in the place of their rank
        shifted = tuple(own + (r - rank) * place for r in range(world))
        return cls(shifted, rank, round(1e3 * hop_us), emulated=True)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.inboxes)

    def pack(self, turn: int) -> bytes:
        """The bytes of `struct Exchange` for a message in front of which `turn` pieces went."""
        addresses = (*self.inboxes, *(0 for _ in range(MAX_WORLD - self.world)))
        numbers = self.rank, self.world, turn % _STAGES, PIECE, self.hop_ns
        raw = struct.pack(f"<{MAX_WORLD}Q5i", *addresses, *numbers)
        return raw + bytes(-len(raw) % 8)


def check_world(world: int) -> None:
    """Refuse worlds that the kernels have no room for.

    Raises:
        DeviceError: naming the number.
    """
    if not 1 <= world <= MAX_WORLD:
        raise DeviceError(f"1 to {MAX_WORLD} GPUs can work together, got {world}")


def inbox(world: int) -> Address:
    """Room on the current GPU for what `world` ranks send to it, all of it empty.

    Raises:
        DeviceError: when the GPU has no room.
    """
    size = inbox_bytes(world)
    address = allocate(size, f"what {world} ranks exchange")
    fill(address, 0xFF, size)  # EMPTY
    return address


def inbox_bytes(world: int) -> int:
    """What `inbox` takes."""
    return _STAGES * world * PIECE * _WORD_BYTES


def pieces(op: Op, world: int) -> int:
    """How many turns a collective's message takes: of a sum in slices two for `world` of them."""
    words = prod(next(ref for _, ref in op.refs).shape)
    if isinstance(op, AllReduce) and op.sliced:
        return 2 * -(-words // (world * PIECE))
    return -(-words // PIECE)
