"""Hashes of what a rank has trained, for comparisons bit by bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(session: Any) -> dict[str, str]:
    """SHA-256 of this rank's weights, and of its FP32 main weights and optimizer moments."""
    weights, optimizer = hashlib.sha256(), hashlib.sha256()

    def add(found: Any, tensor: torch.Tensor) -> None:
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())

    for chunk in session.chunks:
        for parameter in chunk.parameters():
            add(weights, parameter)
    for part in getattr(session.optimizer, "chained_optimizers", [session.optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                add(optimizer, parameter)
                state = part.optimizer.state.get(parameter, {})
                for name in sorted(state):  # a load may leave them in another order
                    add(optimizer, torch.as_tensor(state[name]))
    return {"weights": weights.hexdigest(), "optimizer": optimizer.hexdigest()}
