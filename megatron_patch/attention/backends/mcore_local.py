"""``mcore_local``: Megatron-Core's own unfused `DotProductAttention`, put in unchanged."""

from __future__ import annotations


def module() -> type:
    """The stock class. It materializes the score matrix and takes neither CP nor packed input."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return DotProductAttention
