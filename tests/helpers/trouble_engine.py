"""The fake engine on a machine whose GPU makes trouble. Run as a program: the engine process.

The file that `UF_TEST_TROUBLE` names says what is wrong from the next start on: one of `TROUBLES`,
or nothing. Then the real engine is opened on a driver made of host memory (helpers/fake_cuda.py).
A request with seed `LOST` meets a GPU that is lost while a step runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cuda.bindings import driver as real

from helpers.fake_cuda import FakeCuda, Gpu
from helpers.fake_engine import FakeEngine
from ultraflash.runtime import Engine, RuntimeConfig, Step
from ultraflash.runtime.gpu import driver
from ultraflash.server import worker

LOST = 7
_ECC = {"cuStreamSynchronize": real.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE}
TROUBLES: dict[str, Callable[[], FakeCuda]] = {
    "no driver": lambda: FakeCuda(library=False),
    "old driver": lambda: FakeCuda(version=12080),
    "wrong architecture": lambda: FakeCuda(gpus=(Gpu("NVIDIA GeForce RTX 4090", (8, 9)),)),
    "out of memory": lambda: FakeCuda(gpus=(Gpu(total_bytes=1 << 20),)),
}


class TroubleEngine(FakeEngine):
    """Fails as a GPU does."""

    @classmethod
    def open(cls, config: RuntimeConfig, progress: Callable[[int, int], None]) -> FakeEngine:
        trouble = Path(os.environ["UF_TEST_TROUBLE"]).read_text()
        if trouble:
            vars(driver)["cu"] = TROUBLES[trouble]()
            Engine.open(config, progress)
        return super().open(config, progress)

    def step(self) -> list[Step]:
        """Streams two tokens of a request that is to be lost."""
        steps = super().step()
        if any(s.request.sampling.seed == LOST and s.said == 2 for s in self._live.values()):
            vars(driver)["cu"] = FakeCuda(fail=_ECC)
            driver.Stream().wait()
        return steps


if __name__ == "__main__":
    raise SystemExit(worker.main(open_engine=TroubleEngine.open))
