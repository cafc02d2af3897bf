"""q, k and v as a projection leaves them: neighbours along the head dim of one tensor."""

from __future__ import annotations

import torch

from stable_attention import stable_attention
from stable_attention.layouts import shape

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")
LENGTHS = (33, 7)


def projected(layout, *, d, dv, device="cpu", heads=2, batch=2, length=40):
    """(q, k, v) of [..., d + d + dv]; ``thd`` has one token that belongs to no sequence."""
    rows = length if layout != "thd" else sum(LENGTHS) + 1
    size = shape(layout, batch=batch, length=rows, heads=heads, d=2 * d + dv)
    whole = torch.randn(size, device=device).bfloat16()
    return [x.requires_grad_() for x in whole.split([d, d, dv], -1)]


def gradients(q, k, v, *, layout, seed=7, **options):
    """(dQ, dK, dV, dSinks) of q, k and v as they are."""
    generator = torch.Generator(q.device).manual_seed(seed)
    sinks = torch.zeros(q.shape[1 if layout in ("bhsd", "thd") else 2], device=q.device)
    sinks.requires_grad_()
    if layout == "thd":
        cu = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=q.device)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    out = stable_attention(
        q, k, v, layout=layout, causal=True, sinks=sinks, deterministic=True, **options
    )
    dout = torch.randn(out.shape, generator=generator, device=q.device).to(out.dtype)
    return torch.autograd.grad(out, (q, k, v, sinks), dout)


def in_one_buffer(parts):
    """Whether tensors lie behind one another along the head dim of one allocation."""
    ends = [x.data_ptr() + x.shape[-1] * x.element_size() for x in parts[:-1]]
    one = len({x.untyped_storage().data_ptr() for x in parts}) == 1
    return one and [x.data_ptr() for x in parts[1:]] == ends
