"""Weight gradients added to their FP32 buffer by the matrix product that makes them.

Unfused, a gradient is rounded to BF16, written, read again and added. Megatron-Core has the fused
way only with Apex's extension; cuBLAS does the same through PyTorch. Layers of Transformer Engine
have their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from megatron_patch.core_patches.replace import Change, Replacement


def accumulate(inputs: torch.Tensor, gradients: torch.Tensor, total: torch.Tensor) -> None:
    """Add gradients^T inputs to ``total``.

    Args:
        inputs: [tokens, in].
        gradients: [tokens, out], of the type of ``inputs``.
        total: [out, in] of that type, or float32; slow where it does not begin at 16 bytes.
    """
    if inputs.dtype == total.dtype:
        total.addmm_(gradients.t(), inputs)
        return
    torch.addmm(total, gradients.t(), inputs, out_dtype=total.dtype, out=total)


_KERNELS = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)


def _without_apex() -> Iterator[Change]:
    """The place of Apex's extension, where it is not installed."""
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return
    vars(layers).setdefault("fused_weight_gradient_mlp_cuda", None)
    yield layers, "fused_weight_gradient_mlp_cuda", _KERNELS
    yield layers, "_grad_accum_fusion_available", True


weight_gradient = Replacement(_without_apex)
