"""What the engine offers to `check_golden`: one method for each thing that the golden files hold.

Letters: T rows of a call, S rows before it, P prompt, C copies of the stream, D hidden, V
vocabulary, K selected entries, n compressed entries. bf16 values travel as float32. A state is
opaque. `ultraflash.runtime.probe.Probe` implements this; a method that it lacks turns the items
that need it into SKIP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class GoldenProbe(Protocol):
    """The engine opened up. At world > 1 all arrays are whole, as if there were one rank."""

    def prefill(self, ids: Sequence[int]) -> tuple[Any, F32]:
        """A fresh sequence: its state, and logits [P, V] of all positions."""
        ...

    def extend(self, state: Any, ids: Sequence[int]) -> F32:
        """Logits [T, V] of T more rows: one row is a decode step, more are a chunk."""
        ...

    def prompt(self, ids: Sequence[int], chunk: int) -> tuple[Any, F32]:
        """A fresh sequence through the engine's plans of `chunk` rows: its state, and logits [1, V]
        behind the last row.
        """
        ...

    def begin(self, ids: Sequence[int]) -> Any:
        """The state of a fresh sequence whose first call `forced_layer` will drive."""
        ...

    def advance(self, state: Any, ids: Sequence[int]) -> None:
        """Commit the rows of the call under way and start the next one."""
        ...

    def forced_layer(
        self, state: Any, layer: int, stream: F32 | None, pre: F32 | None, sel: Array | None
    ) -> dict[str, Array]:
        """Run one layer of the call under way, its Engram included, from a given stream.

        `stream` [T, C, D] None means the copied embedding, `pre` [T, C] None the identity mix.
        Attention uses `sel` [T, K'] (-1: nothing), at index sources too; the layer's own choice
        comes back as `sel`. The candidate pool is the one that this engine's run of the candidate
        source made in this call. Caches are written as in any run.

        Keys, as far as they exist for the layer: `engram_kv` [T, (C+1)*D], `engram_X` [T, C, D],
        `hash` [T, columns], `attn_in`, `attn_out`, `ffn_in`, `ffn_out` [T, D], `X` [T, C, D],
        `pre` [T, C], `expert_ids`, `expert_w` [T, k], `latent` [groups completed, head dim] before
        rotation, `sel` [T, K], `index_scores` [T, n] (-inf: cannot be selected).
        """
        ...

    def forced_head(self, state: Any, stream: F32, pre: F32) -> dict[str, Array]:
        """`head_in` [T, D] and `logits` [T, V] of a given stream that leaves the last layer."""
        ...

    def caches(self, state: Any) -> dict[str, Array]:
        """What the N rows so far, those of the call under way included, left: de-quantised.

        `L{L}.window_ring` [min(N, W), head dim], slot = position mod W; `L{L}.main_kv` [n, head
        dim] and `L{L}.index_k` [n, index dim], rotated; `L{L}.pending_kv`, `L{L}.pending_gate` [1,
        head dim] of an incomplete pair.
        """
        ...

    def trace(self, ids: Sequence[int]) -> dict[str, Array]:
        """The choices of a free prefill, all rows.

        `L{L}.expert_ids` [P, k], `L{L}.sel` [P, K], `pool` [P, n] (nonzero: kept).
        """
        ...

    def taps(self, ids: Sequence[int]) -> F32:
        """The drafting input of every row of a fresh sequence, [P, targets*D]."""
        ...

    def draft(self, state: Any | None, taps: F32, anchor: int) -> dict[str, Any]:
        """Feed taps [T, targets*D] at a sequence's next positions, then propose behind them.

        `state` None starts a sequence. Keys: `state`, `main_x` [T, D], `tokens` [1+B] (anchor
        first), `h` [B, D], `logits_before_markov`, `logits` [B, V], `confidence` [B], and for every
        stage `stage{k}.X`, `.pre`, `.attn_out`, `.expert_ids`, `.expert_w` of the block rows and
        `stage{k}.ring` [min(N, W), head dim], slot = position mod W, de-quantised.
        """
        ...

    def quant(self, kind: str, x: F32) -> tuple[Array, Array, F32]:
        """Codes (packed if FP4), scale bytes and values of kind `q8`, `qmx4` or `qnv4`."""
        ...

    def rope(self, table: str, positions: Array, x: F32, inverse: bool) -> F32:
        """x [rows, rotary dims] turned by table `plain` or `compressed`; `tiny_*`: this model's."""
        ...

    def rope_table(self, table: str, positions: Array) -> tuple[F32, F32, F32]:
        """Frequencies [pairs], cosines and sines [rows, pairs]."""
        ...

    def hash_rows(self, which: str, ids: Array, live: Array) -> I64:
        """Table rows [rows, layers, columns].

        `full`: constants of the release, ids are compressed ids. `tiny`: this model, raw ids.
        """
        ...

    def engram_constants(self, which: str) -> dict[str, Any]:
        """`primes` [layers, orders, heads], `offsets`, `multipliers`, `pad_compressed_id`."""
        ...

    def token_map(self) -> I64:
        """Compressed id of every token id."""
        ...

    def sinkhorn(self, mixes: F32, scale: F32, base: F32, iters: int) -> tuple[F32, F32, F32]:
        """`pre` [T, C], `post` [T, C], `comb` [T, C, C] of mix projections [T, C*(C+2)]."""
        ...

    def layer_mix(self, layer: int, stream: F32, y: F32) -> dict[str, Array]:
        """A layer's attention mix: `pre`, `post`, `comb`; `collapse` by that pre; `expand` of y."""
        ...

    def gate(
        self, x: F32, weight: F32, bias: F32, bias_vl: F32, is_image: Array, k: int, scale: float
    ) -> tuple[Array, F32]:
        """Expert ids and weights [T, k], in any order."""
        ...

    def tokenize(self, text: str) -> Sequence[int]:
        """Ids of a string, control tokens included, nothing added."""
        ...


def missing(probe: object, names: Sequence[str]) -> list[str]:
    """Names of the methods that a probe lacks."""
    return [name for name in names if not callable(getattr(probe, name, None))]
