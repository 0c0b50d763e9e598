"""Net 1: parts of the model whose results have no room for rounding, or hardly any."""

from __future__ import annotations

import numpy as np

from ultraflash.tools.golden import limits, measure
from ultraflash.tools.golden.data import Tensors
from ultraflash.tools.golden.run import Run

# The release's routing factor: `gate.full.*` was made with it, whatever the checkpoint at hand
# says.
_RELEASE_ROUTE_SCALE = 1.5


def check_quant(run: Run) -> None:
    """Codes, scales and values of the three quantisers on hostile rows."""
    golden = run.golden.tensors("quant")
    for kind in sorted({key.split(".")[0] for key in golden if "." in key}):
        codes_key = next(key for key in golden if key.startswith(f"{kind}.codes"))
        codes, scales, values = run.probe.quant(kind, golden["x"])
        for key, got in ((codes_key, codes), (f"{kind}.scales", scales), (f"{kind}.deq", values)):
            run.report.add(f"quant {key}", measure.exact(got, golden[key]))


def check_rope(run: Run) -> None:
    """Frequencies to the bit (an ulp is 0.06 rad at 1M), cosines, sines, rotated vectors."""
    golden = run.golden.tensors("rope")
    positions = golden["positions"]
    for table in sorted({key.split(".")[0] for key in golden if "." in key}):
        freq, cos, sin = run.probe.rope_table(table, positions)
        run.report.add(f"rope {table}.freq", measure.exact(freq, golden[f"{table}.freq"]))
        for name, got in (("cos", cos), ("sin", sin)):
            want = golden[f"{table}.{name}"]
            run.report.add(f"rope {table}.{name}", measure.absolute(got, want, limits.ROTARY))
        for name, inverse in (("rot", False), ("rot_inverse", True)):
            got = run.probe.rope(table, positions, golden[f"{table}.x"], inverse)
            want = golden[f"{table}.{name}"]
            run.report.add(f"rope {table}.{name}", measure.bf16_ulps(got, want, limits.ROTATED))


def check_engram_hash(run: Run) -> None:
    """Constants, token map, and the table rows of sequences with dead positions."""
    golden = run.golden.tensors("engram_hash")
    for which in sorted({key.split(".")[0] for key in golden}):
        constants = run.probe.engram_constants(which)
        for name in ("primes", "offsets", "multipliers", "pad_compressed_id"):
            want = golden[f"{which}.{name}"]
            got = np.asarray(constants[name]).reshape(want.shape)
            run.report.add(f"engram_hash {which}.{name}", measure.exact(got, want))
        rows = [
            run.probe.hash_rows(which, ids, live)
            for ids, live in zip(golden[f"{which}.ids"], golden[f"{which}.live"], strict=True)
        ]
        run.report.add(
            f"engram_hash {which}.rows", measure.exact(np.stack(rows), golden[f"{which}.rows"])
        )
        if f"{which}.token_map" in golden:
            got = run.probe.token_map()
            want = golden[f"{which}.token_map"]
            run.report.add(f"engram_hash {which}.token_map", measure.exact(got, want))


def check_sinkhorn(run: Run) -> None:
    """The hyper-connection mix from given projections, and the one of layer 0 with its two uses."""
    golden = run.golden.tensors("sinkhorn")
    for group in sorted({key.split(".")[0] for key in golden if key.startswith("iters")}):
        iters = int(group.removeprefix("iters"))
        got = run.probe.sinkhorn(golden["mixes"], golden["scale"], golden["base"], iters)
        for name, array in zip(("pre", "post", "comb"), got, strict=True):
            key = f"{group}.{name}"
            run.report.add(f"sinkhorn {key}", measure.absolute(array, golden[key], limits.SINKHORN))
    mix = run.probe.layer_mix(0, golden["mix.X"], golden["mix.y"])
    for name in ("pre", "post", "comb"):
        run.report.add(
            f"sinkhorn mix.{name}",
            measure.absolute(mix[name], golden[f"mix.{name}"], limits.SINKHORN),
        )
    for name in ("collapse", "expand"):
        run.report.add(
            f"sinkhorn mix.{name}",
            measure.bf16_ulps(mix[name], golden[f"mix.{name}"], limits.COLLAPSED),
        )


def check_gate(run: Run) -> None:
    """Expert choice and weights of text and image rows."""
    golden = run.golden.tensors("gate")
    for which in sorted({key.split(".")[0] for key in golden}):
        scale = _RELEASE_ROUTE_SCALE if which == "full" else run.golden.model.route_scale
        _gate(run, golden, which, scale)


def _gate(run: Run, golden: Tensors, which: str, scale: float) -> None:
    x, weight, bias, bias_vl, is_image = (
        golden[f"{which}.{name}"] for name in ("x", "weight", "bias", "bias_vl", "is_image")
    )
    want_ids, want = golden[f"{which}.ids_sorted"], golden[f"{which}.w_sorted"]
    ids, weights = run.probe.gate(x, weight, bias, bias_vl, is_image, want_ids.shape[1], scale)
    run.report.add(f"gate {which}.ids", measure.sets(ids, want_ids, 0.0))
    run.report.add(
        f"gate {which}.w", measure.paired(ids, weights, want_ids, want, limits.GATE_WEIGHTS)
    )
