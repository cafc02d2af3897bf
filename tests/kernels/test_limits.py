"""Where 32 bits end: huge windows, far chunks, far tokens. Exact or refused, never wrong."""

from __future__ import annotations

import pytest
import torch

from stable_attention import AttentionArgumentError, configs, layouts, ops, stable_attention
from stable_attention import chunks as kernels
from stable_attention.describe import describe
from stable_attention.problem import Options, Problem
from stable_attention.reference import chunks as reference

HUGE = 2**31 - 1


def randn(*size: int) -> torch.Tensor:
    return torch.randn(size).bfloat16().requires_grad_()


def with_gradients(q, k, v, **options):
    out = stable_attention(q, k, v, **options)
    return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))


@pytest.mark.parametrize("bound", [HUGE - 5, HUGE, 2**31, 2**63])
@pytest.mark.parametrize("causal", [True, False])
def test_a_bound_past_every_key_is_no_bound(bound: int, causal: bool) -> None:
    """int32 sums of position and bound overflowed: zeros, dK = dV = 0, or nothing compiled."""
    q, k, v = randn(1, 40, 2, 16), randn(1, 70, 2, 16), randn(1, 70, 2, 16)
    want = with_gradients(q, k, v, causal=causal)
    for window in ((bound, bound), (bound, -1), (-1, bound)):
        got = with_gradients(q, k, v, causal=causal, window=window)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), window


def test_bounds_near_the_length_hide_what_they_hide() -> None:
    """The first bounds that hide nothing, and those before them, for both alignments."""
    for sq, sk in ((4, 6), (6, 4)):
        q = torch.zeros(1, sq, 1, 16, dtype=torch.bfloat16)
        k = torch.zeros(1, sk, 1, 16, dtype=torch.bfloat16)
        v = torch.eye(sk, 16).bfloat16()[None, :, None]
        i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None, :]
        for left in range(sk - 2, sk + 2):
            for right in range(sq - 2, sq + 2):
                seen = stable_attention(q, k, v, window=(left, right))[0, :, 0, :sk] > 0
                assert torch.equal(seen, (j >= i - left) & (j <= i + right)), (left, right)


def test_packed_sequences_keep_the_bounds_of_the_longest() -> None:
    q, k, v = (randn(30, 2, 16) for _ in range(3))
    cu = torch.tensor([0, 7, 30], dtype=torch.int32)
    packed = {"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 23}
    packed |= {"max_seqlen_k": 23}
    want = with_gradients(q, k, v, **packed)
    for window in ((HUGE, HUGE), (23, 23), (22, 22)):
        got = with_gradients(q, k, v, window=window, **packed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), window


FAR = [
    (2**30, 0, True, (HUGE, 0)),
    (2**30, 0, False, (HUGE, HUGE)),
    (2**31 - 2**13, 0, False, (2**31 - 2**13 + 10, 5)),
    (2**31 - 2**13, 0, False, (HUGE, 2**20)),
    (0, 2**31 - 2**13, False, (2**20, 2**31 - 2**13 + 3)),
    (0, 2**31 - 2**13, False, (5, HUGE)),
    (40, 0, False, (40 + 31, HUGE)),
]


@pytest.mark.parametrize(("q_at", "k_at", "causal", "window"), FAR)
def test_far_chunks_see_what_the_reference_sees(q_at, k_at, causal, window) -> None:
    q, k, v = (randn(1, 33, 2, 16).detach() for _ in range(3))
    options = {"causal": causal, "window": window, "q_position": q_at, "k_position": k_at}
    _, want = reference.chunk_forward(q, k, v, **options)
    _, lse = kernels.chunk_forward(q, k, v, **options)
    torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-5)
    dout = torch.randn(1, 33, 2, 16).bfloat16()
    grads = []
    for module in (reference, kernels):
        dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
        given = {"dq": dq, "dk": dk, "dv": dv, **options}
        module.chunk_backward(dout, q, k, v, want, torch.zeros_like(want), **given)
        grads.append(torch.cat([dq, dk, dv]))
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=2**-6 * float(1 + grads[0].max()))


def test_far_chunks_whose_positions_the_device_holds() -> None:
    q, k, v = (randn(33, 2, 16).detach() for _ in range(3))
    cu = torch.tensor([0, 33], dtype=torch.int32)
    for shift, window in ((2**29, (HUGE, 0)), (0, (HUGE, 3)), (2**29 - 9, (2**29 + 3, 0))):
        options = {"layout": "thd", "cu_seqlens_q": cu, "cu_seqlens_k": cu, "window": window}
        options |= {"q_position": torch.tensor([shift], dtype=torch.int32), "k_position": 0}
        _, want = reference.chunk_forward(q, k, v, **options)
        _, lse = kernels.chunk_forward(q, k, v, **options)
        torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-5)


def test_positions_that_do_not_fit_are_refused() -> None:
    q = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    for name in ("q_position", "k_position"):
        with pytest.raises(AttentionArgumentError, match=name):
            kernels.chunk_forward(q, q, q, **{name: 2**31 - 2**12})
        with pytest.raises(AttentionArgumentError, match=name):
            kernels.chunk_forward(q, q, q, **{name: -1})
    long = torch.empty(1, 1, 1, 16, dtype=torch.bfloat16).expand(1, 2**30, 1, 16)
    with pytest.raises(AttentionArgumentError, match="length of q plus length of k"):
        stable_attention(long, long, long, window=(9, 9))


def far_apart(step: int, tokens: int) -> torch.Tensor:
    return torch.empty_strided(
        (1, tokens, 1, 16), (16, step, 16, 1), dtype=torch.bfloat16, device="meta"
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tokens_too_far_apart_for_the_offsets_of_a_tile_are_refused(name: str) -> None:
    """Row times stride is 32-bit inside a tile: it wrapped, and read foreign memory."""

    def described(step: int, tokens: int) -> Problem:
        near = {x: far_apart(16, tokens) for x in ("q", "k", "v")}
        return describe(**near | {name: far_apart(step, tokens)}, options=Options())[0]

    for step, tokens in ((2**23, 257), (2**23, 1000), (2**31, 1000), (2**26, 33)):
        with pytest.raises(AttentionArgumentError, match=rf"{name}'s stride .* is {step}") as error:
            described(step, tokens)
        assert str(2**23 - 1) in str(error.value) and ".contiguous()" in str(error.value)
    for step, tokens in ((2**23 - 2, 1000), (2**23, 256), (2**40, 1)):
        described(step, tokens)


def test_no_tile_is_taller_than_the_limit_counts_with() -> None:
    rows = [row for rows in configs.table().values() for row in rows.values()]
    assert max(max(row[:2]) for row in rows) <= layouts.MAX_TILE_ROWS


def test_outputs_too_far_apart_are_refused() -> None:
    """sbhd puts a whole batch between two tokens of O, whatever the strides of V."""
    q = torch.empty(300, 4096, 8, 16, dtype=torch.float16, device="meta")
    v = torch.empty(1, 1, 8, 256, dtype=torch.float16, device="meta").expand(300, 4096, 8, 256)
    with pytest.raises(AttentionArgumentError, match="the output's stride"):
        describe(q, q, v, Options(layout="sbhd"))


def test_a_far_apart_gradient_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """dO comes from autograd with any strides, so that refusing it would help nobody."""
    q, k, v = (randn(1, 40, 2, 16) for _ in range(3))
    wide = torch.randn(1, 40, 2, 1024).bfloat16()
    dout = wide[..., :16]
    want = torch.autograd.grad(stable_attention(q, k, v), (q, k, v), dout)
    monkeypatch.setattr(layouts, "MAX_TILE_EXTENT", 40 * 64)
    seen = []
    monkeypatch.setattr(ops, "_unseen", lambda tensors: False)
    operator = ops.backward_op
    monkeypatch.setattr(ops, "backward_op", lambda *a: seen.append(a[0]) or operator(*a))
    got = torch.autograd.grad(stable_attention(q, k, v), (q, k, v), dout)
    assert seen[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_far_apart_partials_and_accumulators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 40, 2, 16, dtype=torch.bfloat16)
    near, lse = torch.zeros(1, 40, 2, 16), torch.zeros(1, 2, 40)
    far = torch.zeros(1, 40, 2, 1024)[..., :16]
    monkeypatch.setattr(layouts, "MAX_TILE_EXTENT", 40 * 64)
    with pytest.raises(AttentionArgumentError, match="part's stride"):
        kernels.merge_chunks(near, lse, far, lse)
    with pytest.raises(AttentionArgumentError, match="out's stride"):
        kernels.finish_chunks(far, lse, dtype=torch.bfloat16)
    with pytest.raises(AttentionArgumentError, match="dk's stride"):
        kernels.chunk_backward(q, q, q, q, lse, lse, dq=near, dk=far, dv=near)
