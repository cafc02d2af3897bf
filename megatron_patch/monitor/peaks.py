"""Dense BF16 peak of known devices, the denominator of MFU.

Values are the vendors' data-sheet tensor-core peaks in TFLOP/s for BF16 with FP32 accumulation and
WITHOUT structured sparsity (half of the "with sparsity" figure), at boost clock. The first pattern
that matches the name reported by the driver wins, so special forms stand before the general ones.
"""

from __future__ import annotations

import re

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB300", 2500.0),
    (r"B300", 2250.0),
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"B100", 1750.0),
    (r"H200 NVL", 835.5),
    (r"H200\b", 989.4),
    (r"GH200", 989.4),
    (r"H100 NVL", 835.5),
    (r"H100 PCIe", 756.0),
    (r"H100\b", 989.4),
    (r"H800 PCIe", 756.0),
    (r"H800\b", 989.4),
    (r"H20\b", 148.0),
    (r"A100\b", 312.0),
    (r"A800\b", 312.0),
    (r"A40\b", 149.7),
    (r"A30\b", 165.0),
    (r"A10G\b", 70.0),
    (r"A10\b", 125.0),
    (r"L40S\b", 362.05),
    (r"L40\b", 181.05),
    (r"L4\b", 121.0),
    (r"RTX 6000 Ada", 364.2),
    (r"RTX 4090\b", 165.2),
    (r"RTX 3090\b", 71.0),
    (r"MI355X", 2516.6),
    (r"MI325X", 1307.4),
    (r"MI300X", 1307.4),
)


def peak_tflops(device_name: str) -> float | None:
    """Dense BF16 peak of one device in TFLOP/s, or None when the name is not in the table.

    Args:
        device_name: as reported by ``torch.cuda.get_device_name``.
    """
    for pattern, peak in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}", device_name, flags=re.IGNORECASE):
            return peak
    return None
