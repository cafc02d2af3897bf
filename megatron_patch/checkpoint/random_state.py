"""The random streams of a rank: Python, NumPy, torch, CUDA and Megatron's tracked streams."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from megatron_patch.parallel.setup import seed_streams


def capture() -> dict[str, Any]:
    """The state of every stream as plain numbers and uint8 tensors."""
    from megatron.core import tensor_parallel

    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {str(key): _plain(value) for key, value in tracked.items()},
    }


def _plain(state: Any) -> torch.Tensor:
    """A tracked stream's state: CUDA-graph safe trackers hold generators, others tensors."""
    return state.get_state() if isinstance(state, torch.Generator) else state.cpu()


def restore(state: dict[str, Any]) -> None:
    """Put every stream back to what `capture` saw."""
    from megatron.core import tensor_parallel

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    current = tracker.get_states()
    tracker.set_states(
        {key: _like(current.get(key), saved) for key, saved in state["tracker"].items()}
    )


def _like(current: Any, saved: torch.Tensor) -> Any:
    if not isinstance(current, torch.Generator):
        return saved
    generator = current.clone_state()
    generator.set_state(saved)
    return generator


def reseed(seed: int, step: int, pp_rank: int) -> int:
    """Seed every stream from ``seed`` and ``step`` alone, for a layout that has no saved streams.

    Returns the seed of pipeline stage 0.
    """
    digest = hashlib.sha256(f"{seed} resumed at step {step}".encode()).digest()
    base = int.from_bytes(digest[:4], "big") >> 1
    seed_streams(base, pp_rank)
    return base
