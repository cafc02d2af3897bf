"""What cannot be is refused, with the reason and what to use instead."""

from __future__ import annotations

import pytest
import torch
from emulate import Exchange, levels_of

from megatron_patch.context_parallel.api import (
    BACKENDS,
    ContextParallelError,
    build,
    check,
    context_parallel_attention,
)
from megatron_patch.context_parallel.packed import padded_cu_seqlens
from stable_attention.problem import Options
from stable_attention.reference import reference_attention


def one(mode: str = "p2p", size: int = 4, heads: int = 8, kv: int = 2, sizes=None) -> None:
    check(mode=mode, size=size, heads=heads, kv_heads=kv, hierarchical_sizes=sizes)


def test_heads_and_groups():
    one()
    one("a2a", kv=1)
    one("a2a+p2p", size=8, sizes=(4, 2))
    with pytest.raises(ContextParallelError, match="'ring'; allowed: p2p, all_gather, a2a, a2a"):
        one("ring")
    with pytest.raises(ContextParallelError, match=r"6 \(of one .*\) is not a multiple of 4. Use"):
        one("a2a", heads=6)
    with pytest.raises(ContextParallelError, match=r"a2a\+p2p with an a2a group of 2, or p2p or"):
        one("a2a", heads=6)
    with pytest.raises(ContextParallelError, match=r"7 .* of 4. Use p2p or all_gather"):
        one("a2a+p2p", size=8, heads=7, kv=7, sizes=(4, 2))
    with pytest.raises(ContextParallelError, match="needs two groups, and none are given"):
        one("a2a+p2p")
    with pytest.raises(ContextParallelError, match=r"\[2, 3\]; allowed: two sizes with product 4"):
        one("a2a+p2p", sizes=(2, 3))
    with pytest.raises(ContextParallelError, match="8 query heads cannot share 3"):
        one(kv=3)


def inputs(s: int = 8, h: int = 4, kv: int = 2, d: int = 8) -> list[torch.Tensor]:
    return [torch.randn(s, 1, n, d, requires_grad=True) for n in (h, kv, kv)]


def test_options(group):
    def call(**options):
        settings = {"group": group, "backend": "reference", **options}
        return context_parallel_attention(*inputs(), **settings)

    for changes, text in (
        ({"layout": "bshd"}, "layout is 'bshd'; allowed under context parallelism: sbhd, thd"),
        ({"backend": "te"}, "backend is 'te'; allowed .*: stable_flash, reference"),
        ({"gradient_wire": "fp8"}, "gradient_wire is 'fp8'; allowed .*: fp32, bf16"),
        ({"dropout_p": 1.0, "dropout_seed": 1}, "dropout_p is 1.0; allowed: 0 <= p < 1"),
        ({"dropout_p": 0.5}, "without dropout_seed; every rank must pass the same seed"),
        ({"stabilizer": "paper_bf16"}, "pass allow_broken=True if you want it"),
        ({"layout": "thd"}, "layout 'thd' needs cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens goes with layout 'thd'"),
        ({"mode": "a2a+p2p"}, "needs two groups, and none are given"),
        ({"sinks": torch.zeros(8)}, r"sinks is of shape \[8\] on cpu; allowed: \[4\]"),
    ):
        with pytest.raises(ContextParallelError, match=text):
            call(**changes)


def test_shapes():
    causal = Options.of(layout="sbhd", causal=True)
    everyone, levels = levels_of(Exchange(), 0, 2, "p2p", 1)

    def make(q, k, v, **options):
        settings = {"primitives": BACKENDS["reference"], **options}
        return build(q, k, v, causal, everyone=everyone, levels=levels, mode="p2p", **settings)

    q, k, v = inputs()
    with pytest.raises(ContextParallelError, match="q has 8 tokens on this rank, k 6 and v 6"):
        make(q, k[:6], v[:6])
    with pytest.raises(ContextParallelError, match=r"7 tokens .* Make the .* a multiple of 2 x 2"):
        make(q[:7], k[:7], v[:7])
    sinks = torch.zeros(8)
    for given, text in (
        ((q, k, v[:6]), "q has 8 tokens on this rank, k 8 and v 6"),
        ((q, k, q), "2 key heads and 4 value heads; allowed: equally many. Repeat"),
        ((q, k[..., :4], v), "head dims 8 of q and 4 of k; allowed: equal"),
        ((q.expand(8, 2, 4, 8), k, v), r"q is \[8, 2, 4, 8\], k .*; allowed: equal batch sizes"),
        ((q, k, v.expand(8, 2, 2, 8)), r"v \[8, 2, 2, 8\]; allowed: equal batch sizes"),
        ((q, k, v, sinks[:1]), r"sinks is of shape \[1\] on cpu; allowed: \[4\] on cpu"),
        ((q, k, v, sinks), r"sinks is of shape \[8\] .*one logit for each query head"),
        ((q, k, v, torch.zeros(4, device="meta")), r"on meta; allowed: \[4\] on cpu"),
        ((q, k, v, sinks[None, :4]), r"sinks is of shape \[1, 4\]"),
    ):
        with pytest.raises(ContextParallelError, match=text):
            make(*given[:3], sinks=given[3] if len(given) > 3 else None)
    make(q, k, v[..., :4], sinks=sinks[::2])


def test_packs_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("STABLE_ATTENTION_DEBUG", "1")
    x = torch.zeros(12, 2, 8)
    causal = Options.of(layout="thd", causal=True)
    everyone, levels = levels_of(Exchange(), 0, 2, "p2p", 1)

    def call(real, padded):
        cu = [torch.tensor(y, dtype=torch.int32) for y in (real, padded)]
        build(
            x, x, x, causal, everyone=everyone, levels=levels, mode="p2p",
            primitives=BACKENDS["reference"], packed=(*cu, None, None),
        )  # fmt: skip

    call([0, 5, 12], [0, 8, 16])
    with pytest.raises(
        ContextParallelError, match="document 1 takes 6 tokens; a multiple of 2 x 2"
    ):
        call([0, 5, 9], [0, 8, 14])
    with pytest.raises(ContextParallelError, match="document 0 has 9 tokens in 8 padded ones"):
        call([0, 9, 12], [0, 8, 16])
    with pytest.raises(ContextParallelError, match="documents take 32 tokens and the pack has 24"):
        call([0, 5, 9], [0, 8, 32])


def test_a_group_of_one_is_plain_attention(group):
    """Odd lengths included, and strided views as Megatron-Core passes them."""
    q, k, v = inputs(s=7)
    fused = torch.cat([k, v], -1)
    out, top = context_parallel_attention(
        q, fused[..., :8], fused[..., 8:], group=group, backend="reference", causal=True,
        window=(3, 0), return_max_logits=True,
    )  # fmt: skip
    want, want_top = reference_attention(
        q, k, v, layout="sbhd", causal=True, window=(3, 0), return_max_logits=True
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(top, want_top)
    grads = torch.autograd.grad(out.sum() ** 2, (q, k, v))
    for mine, theirs in zip(grads, torch.autograd.grad(want.sum() ** 2, (q, k, v)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_pack_on_a_group_of_one_is_plain_attention(group):
    """Documents of odd lengths, which one rank need not pad."""
    real, padded = padded_cu_seqlens([5, 3], 1)
    q, k, v = (x.detach()[:, 0] for x in inputs())
    out = context_parallel_attention(
        q, k, v, group=group, layout="thd", backend="reference", causal=True, cu_seqlens=real,
        cu_seqlens_padded=padded, max_seqlen=5,
    )  # fmt: skip
    want = reference_attention(
        q, k, v, layout="thd", causal=True, cu_seqlens_q=real, cu_seqlens_k=real
    )
    torch.testing.assert_close(out, want)
