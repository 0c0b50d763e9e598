"""What decode and prefill plans share: the scope, the choice of last rows, the sampling node."""

from __future__ import annotations

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.io import io_buffers
from ultraflash.graphs.layers import Scope
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.sample import Sample
from ultraflash.graphs.ops.take_last import TakeLast
from ultraflash.graphs.plan import PlanBuilder, Ref


def scope(
    name: str,
    model: Model,
    rows: int,
    sequences: int,
    capacity: Capacity,
    world: int,
    round_attention: bool,
) -> Scope:
    """An empty plan with its io buffers.

    Raises:
        WorldError: when the model cannot be split over `world` ranks.
    """
    model.check_world(world)
    b = PlanBuilder(name, rows, sequences, world)
    return Scope(b, model, capacity, io_buffers(b, model), round_attention, rows)


def last_rows(s: Scope, name: str, x: Ref) -> Ref:
    """The last row of each sequence, [S, ...]."""
    y = s.b.scratch(f"last.{name}", (s.b.sequences, *x.shape[1:]), x.dtype)
    s.b.add(f"last.{name}", TakeLast(x, s.io.row_start, y))
    return y


def sample(s: Scope, logits: Ref) -> None:
    """A token for each sequence from its last row's logits, [S, V]."""
    io, mask = s.io, last_rows(s, "mask", s.io.mask)
    op = Sample(
        logits,
        mask,
        io.bias_ids,
        io.bias,
        io.banned,
        io.temperature,
        io.top_p,
        io.top_k,
        io.seed,
        io.next_position,
        io.step,
        io.want_logprobs,
        io.token,
        io.logprob,
        io.top_ids,
        io.top_logprobs,
    )
    s.b.add("step_end.sample", op)
