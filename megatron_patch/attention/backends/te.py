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


BACKEND = Backend(
    name="te",
    kernel="Transformer Engine DotProductAttention (picks FlashAttention, cuDNN or unfused)",
    reason="what Megatron users run today",
    cp=True,
    min_sm=(8, 0),
    package="transformer_engine",
    notes=(
        "deterministic needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the environment",
        "its own rules for sinks, windows and packed input apply on top",
    ),
    # Its constructor raises without Transformer Engine.
    module=("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
    install="Install the te extra: pip install megatron-patch-stable[te]",
    own_rules=_own_rules,
)
