"""Tensors of more than 2^31 elements: every offset is 64-bit (FA #2611, pytorch #190857)."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
LIMIT = 2**31


def _grad(q, k, v, dout, **named):
    from stable_attention import stable_attention

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = stable_attention(*leaves, causal=True, deterministic=True, **named)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def _need(gigabytes: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory")


def test_a_token_stride_that_passes_2_31_elements() -> None:
    """Views into a wide buffer: few elements are used, the last tokens lie past 2^31."""
    _need(20)
    n, heads, d = 4200, 1, 64
    width = LIMIT // 4096
    room = torch.empty(n, width, dtype=torch.bfloat16, device="cuda")
    assert (n - 1) * width > LIMIT
    torch.manual_seed(0)
    small = [torch.randn(1, n, heads, d, device="cuda").bfloat16() for _ in range(4)]
    views = []
    for i, x in enumerate(small):
        view = room[:, i * d : (i + 1) * d].unflatten(1, (heads, d))[None]
        view.copy_(x)
        views.append(view)
    for a, b in zip(_grad(*views), _grad(*small), strict=True):
        assert torch.equal(a, b)


def test_a_batch_that_passes_2_31_elements() -> None:
    """The last of many sequences gives the bits it gives alone."""
    _need(60)
    b, n, heads, d = 129, 4096, 32, 128
    assert b * n * heads * d > LIMIT
    x = torch.randn(1, n, heads, d, device="cuda").bfloat16()
    q = x.expand(b, n, heads, d).contiguous()
    first, last = q[:1], q[-1:]
    last.mul_(0.5)
    out, dq, dk, dv = _grad(q, q, q, q)
    for i, part in ((0, first), (b - 1, last)):
        alone = _grad(part, part, part, part)
        for a, c in zip((out, dq, dk, dv), alone, strict=True):
            assert torch.equal(a[i : i + 1], c)


def test_packed_tokens_that_pass_2_31_elements() -> None:
    _need(60)
    heads, d, n = 32, 128, 4096
    count = 129
    total = count * n
    q = torch.randn(n, heads, d, device="cuda").bfloat16().repeat(count, 1, 1)
    assert q.numel() > LIMIT
    cu = torch.arange(0, total + 1, n, dtype=torch.int32, device="cuda")
    named = {"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    named |= {"max_seqlen_q": n, "max_seqlen_k": n}
    whole = _grad(q, q, q, q, **named)
    part = q[-n:].clone()
    one = named | {"cu_seqlens_q": cu[:2], "cu_seqlens_k": cu[:2]}
    for a, b in zip(whole, _grad(part, part, part, part, **one), strict=True):
        assert torch.equal(a[-n:], b)


def test_keys_that_pass_2_31_elements() -> None:
    """Few queries at the end of a K and V of more than 2^31 elements: only the last keys count."""
    _need(40)
    heads, d, near = 16, 128, 8192
    n = LIMIT // (heads * d) + near
    torch.manual_seed(1)
    # As random as it has to be, without 17 GiB of float32: noise in the keys that are seen.
    k, v = (torch.zeros(1, n, heads, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for x in (k, v):
        x[:, -near:].normal_()
        x[:, :-near] = 100.0
    assert k.numel() > LIMIT
    q, dout = (torch.randn(1, 64, heads, d, device="cuda").bfloat16() for _ in range(2))
    window = (4000, 0)
    out, dq, dk, dv = _grad(q, k, v, dout, window=window)
    part = [x[:, -near:].contiguous() for x in (k, v)]
    alone = _grad(q, *part, dout, window=window)
    for name, a, b in zip(("out", "dq"), (out, dq), alone[:2], strict=True):
        assert torch.equal(a, b), name
    for name, a, b in zip(("dk", "dv"), (dk, dv), alone[2:], strict=True):
        assert torch.equal(a[:, -near:], b), name
        assert not bool(a[:, :-near].any()), name
