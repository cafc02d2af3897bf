"""Hugging Face transformers: ``stable_attention.hf.register()``, then
``from_pretrained(..., attn_implementation="stable_attention")``.
"""

from __future__ import annotations

from stable_attention.hf import serving
from stable_attention.hf.attention import attention_forward
from stable_attention.hf.mask import Mask, mask

NAME = "stable_attention"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` available, and refused by models that cannot use it.

    Raises:
        RuntimeError: a transformers older than `serving.OLDEST`.
    """
    serving.check_version()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)
    serving.watch(name)


__all__ = ["NAME", "Mask", "attention_forward", "mask", "register"]
