"""Attention outside the kernels: what runs where they do not, and what probes judge with.

- ``reference_attention``: float32 inside, blocks of keys, trainable on CPU and GPU.
- ``emulators``: the rounding of other implementations, step by step.
"""

from stable_attention.reference.blockwise import reference_attention

__all__ = ["reference_attention"]
