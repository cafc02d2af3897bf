"""Flash attention whose backward pass gets an accurate delta: kernels, reference and probes.

Kernels load on first use, so that importing the package costs neither Triton nor a GPU.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stable_attention.api import stable_attention
    from stable_attention.problem import AttentionArgumentError

__all__ = ["AttentionArgumentError", "__version__", "stable_attention"]


def __getattr__(name: str):
    if name == "stable_attention":
        from stable_attention.api import stable_attention

        return stable_attention
    if name == "AttentionArgumentError":
        from stable_attention.problem import AttentionArgumentError

        return AttentionArgumentError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
