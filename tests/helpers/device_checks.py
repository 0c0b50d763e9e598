"""How close a kernel has to come to its reference, operation by operation.

To the bit: ids, indices, codes, scales, copies and whatever has one order of fp32 operations.
Ceilings of architecture.md section 4 for products. Where exp or a long sum stands between, a
rounding of the reference may fall to the other side: at most one unit, and rarely.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.compare import assert_same_bits, assert_within
from ultraflash.graphs.numerics import E8M0, fake_q8, q8_decode, qnv4_decode, sigmoid, to_bf16
from ultraflash.graphs.ops.index_scores import IndexScores

Array = npt.NDArray[Any]
Inputs = dict[str, Any]
Outputs = dict[str, Array]

MAX_CEILING, RMS_CEILING = 2.0**-11, 2.0**-14


@dataclass(frozen=True)
class Worst:
    """The largest and the root mean square error, over the sum of magnitudes."""

    largest: float
    rms: float


def check_ceilings(
    op: Any, rounded: Array, sums: Array, got: Array, want: Array, scale: Array, same_sums: bool
) -> Worst:
    """`got` are some of the `sums`, `want` the same exactly; `rounded` is what the plan's own type
    makes of all sums, to the bit if they are `same_sums`."""
    again = to_bf16(sums) if op.y.dtype == "bf16" else sums
    if same_sums:
        assert_same_bits(rounded, again)
    else:
        assert_close(rounded, again, 0, 0.01)
    error = np.abs(got.astype(np.float64) - want)
    assert not error[scale == 0].any(), "a sum of zeros is not zero"
    share = np.divide(error, scale, where=scale > 0, out=np.zeros(error.shape))
    worst = Worst(float(share.max()), float(np.sqrt(np.mean(share**2))))
    assert worst.largest <= MAX_CEILING, f"{worst} is above the ceiling {MAX_CEILING}"
    assert worst.rms <= RMS_CEILING, f"{worst} is above the ceiling {RMS_CEILING}"
    return worst


def check(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    """Compare everything that an operation wrote."""
    assert got.keys() == want.keys()
    name = type(op).__name__
    special = _CHECKS.get(name)
    if special:
        special(op, made, some, got, want)
        return
    for field, value in want.items():
        own = _specified(name, made)
        assert_same_bits(got[field][own], value[own].astype(got[field].dtype, copy=False))


def _specified(name: str, made: Inputs) -> Any:
    """Rows whose contents mean something."""
    if name == "RingRead":
        return made["slot"] >= 0
    if name == "TakeLast":
        return np.diff(made["row_start"]) > 0
    return slice(None)


def assert_close(got: Array, want: Array, slack: npt.ArrayLike, share: float) -> None:
    """bf16 values at most a unit and `slack` apart, and only `share` of them differ at all."""
    assert got.dtype == want.dtype == np.float32
    unit = np.abs(want.astype(np.float64)) * 2.0**-7 + 2.0**-133
    assert_within(got, want, unit + np.asarray(slack, np.float64))
    differ = float((got != want).mean())
    assert differ <= max(share, 4 / got.size), f"{differ:.2%} differ, {share:.2%} may"


def _rms_norm(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    if op.q8:  # a unit is a step of Q8: norms that are a bit off would show, they are not
        assert_same_bits(got["y"], want["y"])
    else:
        assert_close(got["y"], want["y"], 0, 0.001)


def _swiglu(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    """bf16 values of which a few are a unit off, then Q8: a step of E4M3, or twice the scale."""
    y, exact = got["y"], want["y"]
    peak = np.abs(exact.reshape(-1, 32)).max(axis=1).repeat(32).reshape(exact.shape)
    assert_within(y, exact, 2.0**-2 * np.abs(exact) + 2.0**-9 * peak)
    differ = float((y != exact).mean())
    assert differ <= max(0.005, 40 / y.size), f"{differ:.2%} differ, 0.5% may"


def _rope_table(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    for field in ("cos", "sin"):
        assert_within(got[field], want[field], 2.0**-24)


def _compress_pairs(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    most = max(np.abs(made["kv"]).max(), np.abs(made["kv_ring"]).max())
    assert_close(got["y"], want["y"], 2.0**-20 * most, 0.005)


def _confidence(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    block = op.y.shape[1]
    both = np.concatenate([made["h"][op.index :: block], made["me"]], axis=1)
    scale = np.abs(both.astype(np.float64)) @ np.abs(made["w"].values()[0])
    error = np.zeros(want["y"].shape)
    error[:, op.index] = 2.0**-22 * scale
    assert_within(got["y"], want["y"], error)  # the other columns are left alone


def _engram_mix(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    copies, dim = op.x.shape[1:]
    value = np.abs(made["kv"][:, None, copies * dim :])
    assert_close(got["y"], want["y"], 2.0**-19 * (np.abs(made["x"]) + value), 0.005)


def _gate(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    """Rows whose last choice hangs on the last bits of exp and log may choose either."""
    logits = made["logits"].astype(np.float64)
    bias, image = made["bias"].values(), made["bias_image"].values()
    biased = np.sqrt(np.logaddexp(0, logits))
    biased = -np.sort(-biased - np.where(made["is_image"][:, None] > 0, image, bias), axis=1)
    clear = np.ones(len(biased), np.bool_)
    if biased.shape[1] > op.k:
        clear = biased[:, op.k - 1] - biased[:, op.k] > 1e-5 * np.abs(biased[:, 0])
    assert clear.sum() >= len(clear) - 1, "inputs with clear choices are needed"
    assert_same_bits(got["ids"][clear], want["ids"][clear])
    assert_within(got["weight"][clear], want["weight"][clear], 4e-6 * want["weight"][clear])


def _hc_in(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    assert_close(got["y"], want["y"], 0, 0.001)
    assert_same_bits(got["y_q8"], fake_q8(got["y"]))


def _hc_mix(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    for field in ("pre", "post", "comb"):
        assert_within(got[field], want[field], 3e-5 * np.abs(want[field]) + 1e-7)


def _index_scores(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    scale = IndexScores.reference(
        made["q"], np.abs(made["weight"]), made["codes"], made["scales"], made["slot"],
        made["position"], made.get("pool"), op.ratio, op.block_size, op.scale,
    )  # fmt: skip
    assert_within(got["y"], want["y"], np.where(np.isfinite(scale), 2.0**-22 * scale, 0))


def _attention(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    """Weights are fp32 exponentials: their errors grow with what they weigh."""
    keys = [np.abs(q8_decode(made["codes"], made["scales"])).max()]
    keys.append(448 * E8M0[made["ring_scales"].max()])
    if "main_codes" in made:
        codes, scales, sel = made["main_codes"], made["main_scales"], np.maximum(made["sel"], 0)
        at = [(made["slot"][t], sel[t]) for t in np.flatnonzero(made["sel"].max(axis=1) >= 0)]
        few = [qnv4_decode(codes[place], scales[place]) for place in at]
        keys += [np.abs(values).max() for values in few]
    largest = float(max(keys))
    rows, heads, dim = op.q.shape
    pairs = made["cos"].shape[1]
    y = want["y"].reshape(rows, heads, dim).astype(np.float64)
    slack = np.full(y.shape, 2.0**-18 * largest)
    turned = y[..., dim - 2 * pairs :].reshape(rows, heads, pairs, 2)
    both = np.sqrt((turned**2).sum(axis=-1, keepdims=True)) * np.ones(2)
    slack[..., dim - 2 * pairs :] += 2.0**-6 * both.reshape(rows, heads, 2 * pairs)
    if op.round_weights:  # a weight that rounds to its other neighbour
        slack += 2.0**-10 * largest
    assert_close(got["y"], want["y"], slack.reshape(rows, -1), 0.03)


def _experts_up(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    """A rounding of gate or up may fall to the other side: one unit of each, through the gate.

    Where one of them is nearly 0, what fp32 loses of its products shows beside it.
    """
    x, ids, slack = made["x"].astype(np.float64), made["ids"], np.zeros(want["y"].shape)
    w1, w3 = (made[name].values(some.columns) for name in ("w1", "w3"))
    for expert in np.unique(ids).tolist():
        rows, places = np.nonzero(ids == expert)
        gate, up = (x[rows] @ w[expert].astype(np.float64).T for w in (w1, w3))
        lost, lost_up = (
            2.0**-22 * (np.abs(x[rows]) @ np.abs(w[expert].astype(np.float64)).T) for w in (w1, w3)
        )
        gate, up = np.minimum(gate, op.limit), np.abs(up).clip(None, op.limit)
        size = 1.1 * np.abs(gate) * up + np.abs(gate) * sigmoid(gate.astype(np.float32)) * up
        size = 2.0**-7 * size + 1.1 * lost * up + np.abs(gate) * lost_up
        slack[rows, places] = size * made["weight"][rows, places, None]
    assert_close(got["y"], want["y"], slack, 0.02)


def _draft_sample(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    assert_same_bits(got["drafts"], want["drafts"])
    assert_within(got["q"], want["q"], 2.0**-22 * np.abs(want["q"].astype(np.float64)))


def _accept(op: Any, made: Inputs, some: Any, got: Outputs, want: Outputs) -> None:
    for field in ("accepted", "token"):
        assert_same_bits(got[field], want[field])
    busy = slice(0, int(made["row_start"][-1]))  # idle rows say nothing
    assert_same_bits(got["top_ids"][busy], want["top_ids"][busy])
    for field in ("logprob", "top_logprobs"):
        value = want[field][busy].astype(np.float64)
        size = np.where(np.isfinite(value), np.abs(value), 0)
        assert_within(got[field][busy], value, 2e-6 + 2e-7 * size)


_CHECKS: dict[str, Callable[[Any, Inputs, Any, Outputs, Outputs], None]] = {
    "RmsNorm": _rms_norm,
    "Swiglu": _swiglu,
    "RopeTable": _rope_table,
    "CompressPairs": _compress_pairs,
    "Confidence": _confidence,
    "EngramMix": _engram_mix,
    "Gate": _gate,
    "HcIn": _hc_in,
    "HcMix": _hc_mix,
    "IndexScores": _index_scores,
    "Attention": _attention,
    "DraftAttention": _attention,
    "ExpertsUp": _experts_up,
    "DraftSample": _draft_sample,
    "Accept": _accept,
}
