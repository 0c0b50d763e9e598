"""What a GPU that cannot go on makes the engine say: one sentence, with figures and a remedy.

Each case is a process of its own, since a context that is lost takes its process with it.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from helpers.device import REHEARSAL, report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REHEARSAL, reason="the interpreter has no memory or context to lose"),
]
_GIB = r"\d+\.\d\d"
# The body of each case; what it raises is printed as the engine process prints it.
_PROGRAM = """
import sys
sys.path[:0] = {path!r}
from helpers.device_rig import DeviceRig
from ultraflash.runtime.errors import DeviceError
from ultraflash.runtime.step_io import Part
try:
{body}
except DeviceError as error:
    print("error:", error)
"""
_TOO_MUCH = """
    rig = DeviceRig(kept=False, slots=50_000_000)
    rig.runner("decode", 1)
"""
_ROOM_AFTERWARDS = """
    rig = DeviceRig(kept=False)
    rig.step([Part(1, 0, [3])])
    from ultraflash.runtime.gpu.driver import allocate, memory
    try:
        allocate(memory()[1], "more than there is")
    except DeviceError as error:
        print("error:", error)
    first = rig.step([Part(2, 0, [3])])[0].values["top_ids"]
    print("went on", first.tolist() == rig.step([Part(3, 0, [3])])[0].values["top_ids"].tolist())
"""
_TRAPPED = """
    rig = DeviceRig(kept=False)
    rig.step([Part(1, 0, [3])])
    from ultraflash.runtime.gpu import nvrtc
    from ultraflash.runtime.gpu.driver import Function
    text = 'extern "C" __global__ void trap(long) {{ asm("trap;"); }}'
    cubin = nvrtc._compile("trap", rig.backend.arch, text).cubin
    rig.backend.stream.launch(Function(cubin, "trap"), (1, 1, 1), (1, 1, 1), 0, bytes(8))
    print("trapped")
    {wait}
    rig.step([Part(1, 1, [4])])
    print("a step went through")
"""


def said(body: str) -> list[str]:
    """What a process with this body prints; it must end by itself, and well."""
    text = _PROGRAM.format(path=sys.path, body=body.strip("\n"))
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_state_that_does_not_fit() -> None:
    (line,) = said(_TOO_MUCH)
    report(line)
    assert re.fullmatch(
        rf"error: state \S+ needs {_GIB} GiB of GPU memory, {_GIB} of {_GIB} GiB are free: lower "
        rf"the context or --max-sequences, or end what else runs on this GPU",
        line,
    )


def test_a_lack_of_memory_leaves_the_rest_working() -> None:
    first, second = said(_ROOM_AFTERWARDS)
    assert first.startswith("error: more than there is needs ")
    assert second == "went on True"


@pytest.mark.parametrize("wait", ["pass", "import time; time.sleep(0.5)"])
def test_a_kernel_that_traps(wait: str) -> None:
    """Found out by the next step, whether the failure was there before it was queued or not."""
    trapped, line = said(_TRAPPED.format(wait=wait))
    report(line)
    assert trapped == "trapped"
    assert re.fullmatch(
        r"error: .+ failed: CUDA_ERROR_LAUNCH_FAILED \(.+\): this process has lost the GPU and "
        r"must start again, UF_CHECK=1 would name the node",
        line,
    )
