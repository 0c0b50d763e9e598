"""What both exchanges between ranks share: how their kernels spread a message over threads."""

from __future__ import annotations

from math import prod

from ultraflash.graphs.plan import Geometry, Ref

PIECE = 1 << 19  # words of a rank's message that go at once; longer ones go in pieces
_THREADS = 256
# All CTAs wait for other ranks, so all must be on the GPU at once, whatever else runs there.
_MAX_CTAS = 128
_WORDS = 4  # that a thread sends at once: 16 bytes


def spread(message: Ref) -> Geometry:
    """Many small CTAs, one vector a thread; larger messages go round."""
    return Geometry(min(_MAX_CTAS, -(-prod(message.shape) // (_THREADS * _WORDS))), 1, _THREADS)
