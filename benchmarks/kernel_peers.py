"""The vendors' kernels on a case of the correctness grid, where they serve it.

``compare_peers`` gives RMS errors against float64 of ours and of SDPA's flash (FlashAttention-2)
and cuDNN backends on the same inputs; ``over_peers`` applies the rule: ours at most 1.02x the
better one's. Small tensors are left out: there the ratio of two RMS errors is luck.
"""

from __future__ import annotations

from typing import Any

import torch

PEER_RATIO = 1.02
# The RMS ratio of two independent roundings of so many elements varies by 0.4 %.
PEER_ELEMENTS = 1 << 16
NAMES = ("SDPA-flash", "SDPA-cuDNN")


def served(case: Any) -> bool:
    """Whether SDPA's backends can be asked for the same function as ``case``."""
    plain = case.sinks == "none" and not case.softcap and not case.dropout and not case.dlse
    whole = case.layout != "thd" and case.left < 0 and case.right < 0
    # is_causal is top-left aligned: the same as ours for squares only.
    aligned = case.sq == case.sk or not case.causal
    return plain and whole and aligned and case.b * case.hq * case.sq * case.d >= PEER_ELEMENTS


def peer_results(case: Any, given: Any) -> dict[str, dict[str, torch.Tensor]]:
    """O, dQ, dK, dV in the case's layout by backend; a backend that refuses is left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from stable_attention.reference.geometry import from_bhsd, to_bhsd

    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    dout = to_bhsd(given.dout, case.layout)
    found = {}
    for name, backend in zip(NAMES, kinds, strict=True):
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
        results = (from_bhsd(x.detach(), case.layout) for x in (out, *grads))
        found[name] = dict(zip(("out", "dq", "dk", "dv"), results, strict=True))
    return found


def compare_peers(case: Any, given: Any, ours: Any) -> dict[str, Any]:
    """{tensor: {who: RMS error}} for ours and the peers; empty where none serves the case."""
    from error_rule import run_oracle

    peers = peer_results(case, given) if served(case) else {}
    if not peers:
        return {}
    truth = run_oracle(case, given, torch.float64)
    table: dict[str, Any] = {}
    for name in ("out", "dq", "dk", "dv"):
        true = getattr(truth, name)
        if true.numel() < PEER_ELEMENTS:
            continue
        rms = {"ours": getattr(ours, name)} | {peer: x[name] for peer, x in peers.items()}
        table[name] = {
            who: float((x.double() - true).pow(2).mean().sqrt()) for who, x in rms.items()
        }
    return table


def over_peers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The tensors of a record whose error exceeds 1.02x the better peer's (finite peers only)."""
    found = []
    for tensor, rms in record.get("peers", {}).items():
        theirs = [x for who, x in rms.items() if who != "ours" and x == x]
        if theirs and not rms["ours"] <= PEER_RATIO * min(theirs):
            found.append({"case": record["case"], "tensor": tensor, "rms": rms})
    return found
