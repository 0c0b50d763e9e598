"""What hardware this machine has, asked without importing any CUDA package."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def num_gpus() -> int:
    """CUDA devices that the driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
