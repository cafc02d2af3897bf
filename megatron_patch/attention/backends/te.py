"""``te``: Transformer Engine's `DotProductAttention`, which picks its own kernel."""

from __future__ import annotations


def module() -> type:
    """Megatron-Core's class around it; its constructor raises without Transformer Engine."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention
