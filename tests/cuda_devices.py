"""How many GPUs there are, without importing torch while tests are collected."""

from __future__ import annotations

import ctypes
import os
from functools import cache


@cache
def cuda_devices() -> int:
    """CUDA devices that a process may use; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return 0
    try:
        # NVML and not the CUDA driver: cuInit here would break CUDA in forked children.
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value if visible is None else min(count.value, len(visible.split(",")))
