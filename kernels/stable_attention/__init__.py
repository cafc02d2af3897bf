"""Flash attention whose backward pass gets an accurate delta: kernels, reference and probes.

Kernels load on first use, so that importing the package costs neither Triton nor a GPU.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stable_attention.api import stable_attention
    from stable_attention.carriers import cure, cured
    from stable_attention.flash_compat import flash_attn_func, flash_attn_varlen_func
    from stable_attention.problem import AttentionArgumentError

__all__ = [
    "AttentionArgumentError",
    "__version__",
    "cure",
    "cured",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "stable_attention",
]

_HOMES = {
    "AttentionArgumentError": "problem",
    "cure": "carriers",
    "cured": "carriers",
    "flash_attn_func": "flash_compat",
    "flash_attn_varlen_func": "flash_compat",
    "stable_attention": "api",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
