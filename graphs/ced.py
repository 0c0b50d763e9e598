"""Prefill that skips the decoder for most of a prompt (model.md section 4.10, causal
encoder-decoder).

Two plans: `build_encode` runs the encoder over every chunk and leaves what the decoder will need;
`build_replay` runs the decoder once over the last `tail` tokens of the whole prompt, each row's
window reaching back to the first replayed position at most. CED-20 replays from the last KV source
layer on, CED-21 from the layer behind it (numbers of the released model).
"""

from __future__ import annotations

from ultraflash.graphs.backbone import embedded, layers, shared, write_history
from ultraflash.graphs.draft import append_context
from ultraflash.graphs.errors import ConfigError
from ultraflash.graphs.model import Model
from ultraflash.graphs.ops.ring_read import RingRead
from ultraflash.graphs.plan import Plan, Ref
from ultraflash.graphs.prefill import end_of_prompt
from ultraflash.graphs.residual import sublayer_input
from ultraflash.graphs.scope import Scope, Streams, write_ring
from ultraflash.graphs.step import Build, scope

MODES = ("full", "ced20", "ced21")


def replay_start(model: Model, mode: str) -> int:
    """The first layer that a replay runs."""
    return model.decoder_start + (mode == "ced21")


def build_encode(build: Build, mode: str, tail: int, rows: int) -> Plan:
    """Up to `rows` prompt rows through the encoder, decoder entries included.

    Streams (and under CED-21 selections and pools) of the last rows stay in rings for the replay.

    Raises:
        WorldError: when the model cannot be split over `build.world` ranks.
        ConfigError: when layers of the wrong half have n-grams or drafting inputs.
    """
    start = replay_start(build.model, mode)
    _check_halves(build, mode, start)
    s = scope(f"encode_{mode}", build, rows, 1, 0)
    common, streams = embedded(s, shared(s))
    out = layers(s, range(start), streams, common, taps=False)
    if mode == "ced20":
        # The decoder's only global KV is a function of what leaves the encoder.
        label, weights = f"L{start}.attn", f"layers.{start}"
        x, _ = sublayer_input(s, label, out.streams, f"{weights}.attn_norm")
        common.store.add_entries(start, x)
    for value, into in _kept(s, mode, tail, start):
        write_ring(s, "keep", value, into)
    write_history(s, common)
    return s.b.build()


def build_replay(build: Build, mode: str, tail: int) -> Plan:
    """The decoder over the last rows of a prompt; ends as every prefill does. io ids are the rows'
    tokens.

    Raises:
        WorldError: when the model cannot be split over `build.world` ranks.
    """
    s = scope(f"replay_{mode}", build, tail, 1, 1)
    m = s.model
    start, common = replay_start(m, mode), shared(s)
    common.store.know_entries(m.decoder_start)
    for value, ring in _kept(s, mode, tail, start):
        s.b.add("replay.read", RingRead(ring, s.io.slot, s.io.position, value))
    if mode == "ced21":
        common.store.sel[m.decoder_start], common.store.pool = _selection(s)
    out = layers(s, range(start, m.num_layers), _streams(s, start), common, build.block > 0)
    if out.taps:
        append_context(s, out.taps)
    end_of_prompt(s, build.block, out.streams)
    return s.b.build()


def _check_halves(build: Build, mode: str, start: int) -> None:
    """Only the encoder sees token ids, and only replayed rows have taps."""
    model = build.model
    late = [n for n in model.engram_layers if n >= start]
    early = [n for n in model.draft_targets if n < start] if build.block else []
    if late or early:
        raise ConfigError(
            f"prefill {mode} replays layers {start} and up, which must hold no Engram (here in "
            f"{late}) and every draft target (not so {early}): use prefill full"
        )


def _streams(s: Scope, start: int) -> Streams:
    m, before = s.model, f"L{start - 1}"
    return Streams(
        s.out(f"{before}.X", (m.hc, m.hidden)), s.out(f"{before}.ffn.pre", (m.hc,), "f32")
    )


def _selection(s: Scope) -> tuple[Ref, Ref]:
    m, label = s.model, f"L{s.model.decoder_start}.attn"
    return (
        s.out(f"{label}.sel", (m.index_topk,), "i32"),
        s.out(f"{label}.pool", (m.candidate_blocks,), "i32"),
    )


def _kept(s: Scope, mode: str, tail: int, start: int) -> list[tuple[Ref, Ref]]:
    """(a step's rows, the ring they stay in) of everything that a replay starts from."""
    streams = _streams(s, start)
    rows = [streams.x, streams.pre, *(_selection(s) if mode == "ced21" else ())]
    size = 1 << (tail - 1).bit_length()
    shape = (s.capacity.slots, size)
    return [(r, s.b.state(f"replay.{r.name}", (*shape, *r.shape[1:]), r.dtype)) for r in rows]
