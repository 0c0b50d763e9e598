"""What hardware this machine has, asked without importing any CUDA package."""

from __future__ import annotations

import ctypes
import functools

# Compute capabilities that kernels exist for. Another GPU skips tests as none at all does: a
# developer's workstation has one that cannot run them.
_CAPABILITIES = {(9, 0), (10, 0), (10, 3)}
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute


@functools.cache
def num_gpus() -> int:
    """CUDA devices that our kernels run on; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return sum(_capability(driver, ordinal) in _CAPABILITIES for ordinal in range(count.value))


def _capability(driver: ctypes.CDLL, ordinal: int) -> tuple[int, ...]:
    device, value, found = ctypes.c_int(0), ctypes.c_int(0), []
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    for attribute in (_MAJOR, _MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found.append(value.value)
    return tuple(found)
