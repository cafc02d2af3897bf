"""How many GPUs a run takes where some would be idle (``--widen``).

Batches and update of a run are the same on any number of GPUs that divide its batch, and a
checkpoint goes on with any number of data-parallel ranks. What differs is the order in which
gradients are summed, as between any two numbers of GPUs.
"""

from __future__ import annotations

from megatron_patch.experiments.protocol import Run

WORTH_SECONDS = 120.0
"""A run is stopped for more GPUs only if that should save as much. Stopping and starting takes half
of it, and more GPUs are never quicker in proportion."""


def widest(run: Run, own: int, most: int) -> int:
    """The largest number of GPUs up to ``most`` that can share the batch; at least ``own``."""
    return next((gpus for gpus in range(most, own, -1) if run.fits(gpus)), own)


__all__ = ["WORTH_SECONDS", "widest"]
