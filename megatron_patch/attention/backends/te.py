"""``te``: Transformer Engine's core attention, as Megatron-Core wraps it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_patch.attention.backends.row import Backend, LayerRequirements

if TYPE_CHECKING:
    from collections.abc import Iterator

_DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def _own_rules(facts: LayerRequirements) -> Iterator[str]:
    if facts.deterministic and os.environ.get(_DETERMINISM) != "0":
        yield (
            f"training.deterministic with Transformer Engine needs {_DETERMINISM}=0 in the "
            "environment. Export it before start"
        )


def _rules(facts: LayerRequirements) -> Iterator[str]:
    """Transformer Engine 2.20 ends with "No dot product attention backend" or an assertion."""
    mode = facts.cp_comm_type if facts.cp > 1 else None
    if mode not in (None, "a2a", "all_gather") and facts.window is not None:
        yield (
            f"sliding window {list(facts.window)} under parallel.cp_comm_type {mode}. Use a2a or "
            "all_gather, or attention.backend: stable_flash"
        )
    if mode not in (None, "a2a") and facts.sinks:
        yield (
            f"attention sinks under parallel.cp_comm_type {mode}. Use a2a, or attention.backend: "
            "stable_flash"
        )
    if not facts.fp8:
        return
    limits = {
        f"head dimension {facts.head_dim}, {facts.v_head_dim}; Hopper trains with 128 alone": (
            facts.head_dim != 128 or facts.v_head_dim != 128
        ),
        "a sliding window (model.window)": facts.window is not None,
        "attention sinks (model.softmax_type)": facts.sinks,
        "attention dropout (model.attention_dropout)": facts.dropout,
        "the maximum logit of each head (qk_clip)": facts.max_logits,
        "packed sequences (thd)": facts.thd,
    }
    for text, unsupported in limits.items():
        if unsupported:
            yield f"FP8 attention with {text}. Use attention.fp8: false"


BACKEND = Backend(
    name="te",
    kernel="Transformer Engine DotProductAttention (picks FlashAttention, cuDNN or unfused)",
    reason="what Megatron users run today",
    cp=True,
    min_sm=(8, 0),
    fp8=True,
    package="transformer_engine.pytorch",
    notes=(
        "deterministic needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment",
        "under context parallelism a window needs a2a or all_gather, sinks need a2a",
        "FP8 on Hopper: head dim 128, delayed scaling, no window, sinks or dropout",
    ),
    # Its constructor raises without Transformer Engine.
    module=("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
    install="Install the te extra: pip install megatron-patch-stable[te]",
    rules=_rules,
    own_rules=_own_rules,
)
