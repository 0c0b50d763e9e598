"""Plans of the tiny model as text: a change of a step shows as a diff in review.

`python tests/helpers/golden_plans.py [FOLDER]` writes them, into tests/golden/plans when no folder
is given; git shows what changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ultraflash.graphs.capacity import Capacity
from ultraflash.graphs.ced import build_encode, build_replay
from ultraflash.graphs.decode import build_decode
from ultraflash.graphs.model import Model
from ultraflash.graphs.plan import Plan
from ultraflash.graphs.prefill import build_prefill
from ultraflash.graphs.step import Build

_GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = _GOLDEN / "plans"
REMAKE = "# remake: python tests/helpers/golden_plans.py\n"
CAPACITY = Capacity(slots=5, max_seq=256)


def tiny_model() -> Model:
    return Model.from_checkpoint(_GOLDEN / "tiny-a" / "ckpt")


# file name -> plan; each shows something that the others do not.
PLANS: dict[str, Callable[[], Plan]] = {
    "decode_rows1": lambda: build_decode(Build(tiny_model(), CAPACITY), 1, 1),
    "decode_rows6_sequences2_world2": lambda: build_decode(
        Build(tiny_model(), CAPACITY, world=2, block=5, round_attention=True), 6, 2
    ),
    "prefill_rows16": lambda: build_prefill(Build(tiny_model(), CAPACITY, block=5), 16),
    "encode_ced21_rows16": lambda: build_encode(Build(tiny_model(), CAPACITY), "ced21", 24, 16),
    "replay_ced21": lambda: build_replay(Build(tiny_model(), CAPACITY, block=5), "ced21", 24),
}


def text(name: str) -> str:
    """What the file of this plan holds: the command, the digest, the listing."""
    plan = PLANS[name]()
    return f"{REMAKE}# digest: {plan.digest()}\n{plan.text()}"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLANS:
        path = folder / f"{name}.txt"
        path.write_text(text(name), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
