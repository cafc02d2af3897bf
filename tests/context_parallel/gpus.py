"""How many GPUs there are, without importing torch while tests are collected."""

from __future__ import annotations

import ctypes
import os


def devices() -> int:
    """CUDA devices according to NVML; 0 without a driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count.value if chosen is None else min(count.value, len(chosen.split(",")))
