"""Every tolerance, with its reason. Numbers are relative rms unless a comment says otherwise.

The reference rounds each attention weight to bf16, relative to the running maximum of groups of 64
keys. An engine with the same switch is held to `TIGHT`; one that keeps fp32 weights is just as
correct, and is held to `LOOSE`: the quantiser in front of the output projection turns that ulp
into 1 to 3 % of a layer's attention output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Net 1, where it is not equality.
SINKHORN = 1e-6  # absolute
ROTARY = 1e-7  # absolute, of cosine and sine
ROTATED = 1  # bf16 ulps
GATE_WEIGHTS = 1e-5  # fp32 in, fp32 out: only the order of sums may differ
COLLAPSED = 1  # bf16 ulps of a collapsed or expanded stream

# Of a draft block's five rows, how many may choose other experts; more behind a free run's context.
DRAFT_EXPERT_ROWS, FREE_DRAFT_EXPERT_ROWS = 0.4, 0.6

# Net 2. Rows whose expert set or selection may differ: near ties flip on an ulp. A single row may
# not.
EXPERT_ROWS = 0.05
SELECTED_ROWS = 0.04

# Net 3. A row is judged by its argmax only where the golden margin (best minus second logit) is
# beyond the drift, which is a few per cent of a logit spread of about 3.
CLEAR_MARGIN = 1.0
FEW_ROWS, FEW_ROWS_FACTOR = 30, 1.4  # quantiles of few rows scatter more
SHORT_PROMPT = 2  # up to here a prompt's rows meet too few choices to drift
# Discrete choices of a free run are clear where the golden run's own gap (last winner minus first
# loser) is above the median gap of that layer over all prompts.
CLEAR_GAP_QUANTILE = 0.5
STALE = 0.5  # half-way to a known mistake is too far
# `official` rounds index scores to bf16, we do not: its free runs drift by this much more.
OTHER_INDEX_ROUNDING = 1.4


@dataclass(frozen=True)
class Limits:
    """The tolerances that depend on how attention weights are rounded."""

    forced: Mapping[str, float]
    # Golden files may leave out streams inside a call (they do for long prompts). A layer then
    # starts from this engine's own stream, or attends to caches made from one, and inherits up to
    # three layers of isolated ulps and of the flips they cause: its limits are this much wider, but
    # never wider than `free_caches`, and its choices are judged as those of a free run.
    chained: float
    logits: float
    short_logits: float
    row_quartile: float
    row_median: float
    clear_rows_wrong: float
    clear_missed: Mapping[str, float]
    missed: Mapping[str, float]
    free_caches: float
    # Drafting behind golden taps: isolated ulps, and the flips they cause in quantised rows. Behind
    # this engine's own taps three stages add flips of their own to a free run's drift.
    draft: float
    free_draft: float


TIGHT = Limits(
    forced={
        "engram_kv": 2e-3,
        "engram_X": 2e-3,
        "attn_in": 5e-3,
        "attn_out": 1e-2,
        "ffn_in": 5e-3,
        "ffn_out": 1e-2,
        "X": 3e-3,
        "pre": 1e-3,
        "latent": 5e-3,
        "expert_w": 1e-3,
        "index_scores": 2e-2,
        "head_in": 3e-3,
        "logits": 3e-3,
        # Quantised values: one code more or less is 6 % (Q8) or 25 % (the FP4 forms) of an element.
        "window_ring": 5e-3,
        "main_kv": 1e-2,
        "index_k": 1e-2,
        "pending_kv": 1e-3,
        "pending_gate": 1e-3,
    },
    logits=0.15,
    short_logits=0.05,
    row_quartile=0.055,
    row_median=0.085,
    clear_rows_wrong=0.02,
    clear_missed={"experts": 0.02, "selected": 0.3},
    missed={"experts": 0.15, "selected": 0.35},
    chained=10.0,
    free_caches=0.15,
    draft=0.05,
    free_draft=0.3,
)
LOOSE = replace(
    TIGHT,
    forced={
        **TIGHT.forced,
        "engram_X": 3e-3,
        "attn_in": 8e-3,
        "attn_out": 4e-2,
        "ffn_in": 1.3e-2,
        "ffn_out": 7e-2,
        "X": 2.5e-2,
        "pre": 3e-3,
        "latent": 8e-3,
        "expert_w": 5e-3,
    },
    logits=0.2,
    short_logits=0.13,
    row_quartile=0.095,
    row_median=0.125,
    clear_rows_wrong=0.1,
    clear_missed={"experts": 0.04, "selected": 0.4},
    missed={"experts": 0.2, "selected": 0.45},
    free_caches=0.2,
    draft=0.13,
    free_draft=0.4,
)
BY_ATTENTION = {"bf16": TIGHT, "fp32": LOOSE}


def limits_for(attention: str, world: int) -> Limits:
    """The tolerances for a rounding of attention weights and a number of ranks.

    Several ranks leave out the rounding of each expert's output, which is as much to three draft
    stages in a row as fp32 attention weights are; single layers stay within the same limits.
    """
    chosen = BY_ATTENTION[attention]
    return chosen if world == 1 else replace(chosen, draft=LOOSE.draft, free_draft=LOOSE.free_draft)
