"""Attention outside the kernels: what they are judged against, and what runs where they do not.

- ``reference_attention``: float32 inside, blocks of keys, trainable on CPU and GPU.
- ``oracle_attention``: float64, one matrix at a time, gradients by autograd; small shapes.
- ``emulators``: the rounding of other implementations, step by step.
"""

from stable_attention.reference.blockwise import reference_attention
from stable_attention.reference.oracle import OracleResult, gradients, oracle_attention

__all__ = ["OracleResult", "gradients", "oracle_attention", "reference_attention"]
