"""SDPA's flash (FlashAttention-2) and cuDNN kernels on a case of the grid, where they serve it.

The rule: the RMS error of ours against float64 is at most 1.02x that of the better one. Small
tensors are left out: there the ratio of two RMS errors is luck.
"""

from __future__ import annotations

import math

import torch
from attention_cases import Case, Inputs
from error_rule import Results, run_oracle

from stable_attention.reference.geometry import from_bhsd, to_bhsd

RATIO = 1.02
# The RMS ratio of two independent roundings of so many elements varies by 0.4 %.
ELEMENTS = 1 << 16
TENSORS = ("out", "dq", "dk", "dv")


def served(case: Case) -> bool:
    """Whether SDPA's backends can be asked for the same function as ``case``."""
    plain = case.sinks == "none" and not case.softcap and not case.dropout and not case.dlse
    whole = case.layout != "thd" and case.left < 0 and case.right < 0
    # is_causal is top-left aligned: the same as ours for squares only.
    aligned = case.sq == case.sk or not case.causal
    return plain and whole and aligned and case.b * case.hq * case.sq * case.d >= ELEMENTS


def results(case: Case, given: Inputs) -> dict[str, dict[str, torch.Tensor]]:
    """O, dQ, dK, dV in the case's layout by backend; a backend that refuses is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "SDPA-flash": SDPBackend.FLASH_ATTENTION,
        "SDPA-cuDNN": SDPBackend.CUDNN_ATTENTION,
    }
    dout = to_bhsd(given.dout, case.layout)
    found = {}
    for name, backend in kinds.items():
        q, k, v = (
            to_bhsd(x, case.layout).detach().requires_grad_() for x in (given.q, given.k, given.v)
        )
        try:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    is_causal=bool(case.causal),
                    scale=case.scale or None,
                    enable_gqa=case.hq != case.hk,
                )
                grads = torch.autograd.grad(out, (q, k, v), dout)
        except RuntimeError as error:
            if "CUDA error" in str(error):
                raise
            continue
        tensors = (from_bhsd(x.detach(), case.layout) for x in (out, *grads))
        found[name] = dict(zip(TENSORS, tensors, strict=True))
    return found


def over(ours: float, theirs: dict[str, float]) -> bool:
    """Whether our RMS error breaks the rule; a vendor's NaN is no yardstick, ours no excuse."""
    finite = [x for x in theirs.values() if not math.isnan(x)]
    return bool(finite) and not ours <= RATIO * min(finite)


def problems(case: Case, given: Inputs, ours: Results) -> list[str]:
    """The tensors in which a vendor's kernel is more exact by more than the rule allows."""
    vendors = results(case, given)
    if not vendors:
        return []
    truth = run_oracle(case, given, torch.float64)
    found = []
    for name in TENSORS:
        true = getattr(truth, name)
        if true.numel() < ELEMENTS:
            continue

        def rms(x: torch.Tensor, true: torch.Tensor = true) -> float:
            return float((x.double() - true).pow(2).mean().sqrt())

        mine, theirs = rms(getattr(ours, name)), {who: rms(x[name]) for who, x in vendors.items()}
        if over(mine, theirs):
            found.append(f"{name}: RMS error {mine:.4g}, vendors {theirs}")
    return found
