"""Which GPUs a child process gets, of those that this one may use."""

from __future__ import annotations

import os
from collections.abc import Sequence


def visible_devices(wanted: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a child: GPUs by their number among those that this process sees.

    Raises:
        ValueError: this process sees fewer.
    """
    mine = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not mine:
        return ",".join(map(str, wanted))
    if max(wanted) >= len(mine):
        raise ValueError(
            f"GPU number {max(wanted)} of {len(mine)} in CUDA_VISIBLE_DEVICES={','.join(mine)}: "
            "ask for fewer GPUs, or make more of them visible"
        )
    return ",".join(mine[number] for number in wanted)
