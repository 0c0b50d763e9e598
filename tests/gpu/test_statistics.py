"""Random tokens of the device: its generator's numbers, its kernels' choices, and what they write,
statistically. Engines that are wrong on purpose are found out on the CPU by the same measures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from helpers.chi_square import bound, chi_square
from helpers.device import REHEARSAL, count, report, sized
from helpers.device_cases import Case
from helpers.device_ops import Ops, run_case
from helpers.device_speculation import DeviceSpeculation, accept_op, draft_op, neutral
from helpers.device_weights import Shelf
from helpers.speculation import Speculation, make_toy, total_variation, variation_bound
from ultraflash import ptx
from ultraflash.graphs.numerics import F64
from ultraflash.graphs.philox import Purpose, uniform
from ultraflash.graphs.sampling import distribution

pytestmark = pytest.mark.gpu

VOCAB, BLOCK = 3, 4
SEQUENCES = sized(4096, 256)  # a launch
CONVERSATIONS = count("UF_GPU_CONVERSATIONS", 200_000, 600)

_PROBE = """
struct Args {
    const u64* seed;
    const int *position, *step;
    const u32* purpose;
    double* y;
    i64 n;
};
extern "C" __global__ void uf_probe(const Args a) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.y[i] = uniform(a.seed[i], a.position[i], a.step[i], a.purpose[i]);
}
"""


@pytest.mark.skipif(REHEARSAL, reason="the interpreter's generator is the reference itself")
def test_numbers_are_the_references(seed: int) -> None:
    """A million keys and counters, extreme ones among them, to the bit."""
    from ultraflash.runtime.gpu.driver import Device, Function, Stream, allocate, download, upload
    from ultraflash.runtime.gpu.nvrtc import _compile

    device = Device.open()
    headers = [(ptx.FOLDER / "uf" / name).read_text() for name in ("types.cuh", "philox.cuh")]
    text = "\n".join(headers).replace("#include <uf/types.cuh>", "") + _PROBE
    kernel = _compile("probe", device.arch, text)
    rng, n = np.random.default_rng(seed), 1 << 20
    seeds = rng.integers(0, 2**64, n, dtype=np.uint64)
    seeds[:4] = 0, 1, 2**63, 2**64 - 1
    position = rng.integers(0, 1 << 20, n).astype(np.int32)
    step = rng.integers(0, 2**31 - 1, n).astype(np.int32)
    position[:3], step[:3] = (0, 2**31 - 1, 1), (2**31 - 1, 0, 1)
    purpose = rng.integers(1, 4, n).astype(np.uint32)
    got = np.zeros(n)
    inputs: list[npt.NDArray[Any]] = [seeds, position, step, purpose, got]
    addresses = [allocate(a.nbytes, "numbers") for a in inputs]
    for address, array in zip(addresses, inputs, strict=True):
        upload(address, array)
    stream = Stream()
    packed = np.array([*addresses, n], np.uint64).tobytes()
    stream.launch(Function(kernel.cubin, "uf_probe"), (n // 256, 1, 1), (256, 1, 1), 0, packed)
    stream.wait()
    download(addresses[-1], got)
    for wanted in Purpose:
        own = purpose == wanted
        want = uniform(seeds[own], position[own], step[own], wanted)
        assert got[own].tobytes() == want.tobytes(), wanted.name
    report(f"philox: {n} numbers equal to the bit")


@pytest.mark.parametrize("vocab", [7, 37, 512, 1000])
def test_random_blocks_are_verified_as_the_reference_does(ops: Ops, vocab: int) -> None:
    """Every mixture of sampling parameters, masks, biases and bans; tokens equal."""
    sequences = sized(400, 12)
    for block in (1, 4, 7):
        rows = sequences * (block + 1) * 2 // 3
        op = accept_op(rows, sequences, sequences, block, vocab)
        for trial in range(sized(4, 2)):
            run_case(ops, Case(f"accept {vocab} {block}", op), Shelf(), trial)


@pytest.mark.parametrize("vocab", [7, 37, 512, 1000])
def test_random_proposals_are_drawn_as_the_reference_does(ops: Ops, vocab: int) -> None:
    sequences = sized(1000, 12)
    for index in (0, 4):
        op = draft_op(sequences, sequences, 5, vocab, index)
        for trial in range(sized(4, 2)):
            run_case(ops, Case(f"draft {vocab} {index}", op), Shelf(), trial)


UNEVEN = tuple(float(v) for v in 2 * np.random.default_rng(11).normal(size=37))
ASKS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_p": {"top_p": 0.8},
    "top_p_small": {"top_p": 0.05},
    "top_k": {"top_k": 5},
    "all": {"temperature": 1.5, "top_k": 9, "top_p": 0.7},
}


def expected(how: dict[str, float]) -> F64:
    whole = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **how}
    # As the kernel gets them: float32.
    settings = float(np.float32(whole["temperature"])), float(np.float32(whole["top_p"]))
    return distribution(np.array(UNEVEN, np.float32), *settings, int(whole["top_k"]))


@pytest.mark.parametrize("kind", ["accept", "draft"])
@pytest.mark.parametrize("how", ASKS.values(), ids=ASKS.keys())
def test_one_token_is_distributed_as_asked(ops: Ops, kind: str, how: dict[str, float]) -> None:
    vocab, n = len(UNEVEN), SEQUENCES
    op = accept_op(n, n, n, 0, vocab) if kind == "accept" else draft_op(n, n, 1, vocab, 0)
    made, held = neutral(op), ops.hold(op, {})
    made["logits"][:], made["slot"][:] = UNEVEN, np.arange(n)
    for name, value in how.items():
        made[name][:] = value
    if kind == "accept":
        made["row_start"][:] = np.arange(n + 1)
    seen = np.zeros(vocab, np.int64)
    for launch in range(sized(20, 3)):
        made["seed"][:] = np.arange(n) + launch * n
        out = held.run(made)
        tokens = out["token"] if kind == "accept" else out["drafts"][:, 0]
        seen += np.bincount(tokens, minlength=vocab)
    statistic, freedom = chi_square(seen, expected(how))
    assert statistic <= bound(freedom), f"chi-square {statistic} of {freedom} degrees"


@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("width", ["all", "fixed", "adaptive"])
def test_four_tokens_are_distributed_as_the_targets(ops: Ops, width: str, masked: bool) -> None:
    """Several steps of draft, width, verification: the joint distribution of the first four tokens,
    and conversation by conversation what the CPU writes from the same numbers."""
    toy = make_toy(12, VOCAB, BLOCK, masked)
    seeds = np.arange(CONVERSATIONS, dtype=np.uint64)
    run = DeviceSpeculation(toy, width, ops, SEQUENCES)
    answers = run.run(seeds)
    exact = toy.joint()
    distance = total_variation(answers, exact, VOCAB)
    most = variation_bound(exact, CONVERSATIONS)
    same = (answers == Speculation(toy, "block", width).run(seeds)).all(axis=1).mean()
    name = f"{width}, {'masked' if masked else 'free'}"
    report(f"joint distribution, {name}: {distance:.4f} of {most:.4f}; {same:.6f} as on the CPU")
    if not masked:
        assert (run.steps_by_accepted > CONVERSATIONS / 200).all(), "a length hardly ever occurs"
    assert distance < most
    # Logits are float32 on the device: a number in ten million falls to the other side.
    assert same >= 1 - max(1e-4, 2 / CONVERSATIONS)
