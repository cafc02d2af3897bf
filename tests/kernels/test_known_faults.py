"""Faults that other attention implementations shipped, as regression tests of ours.

Each name carries the public issue or pull request. Faults of context parallelism and of training
stacks have their tests in those rooms.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, make_inputs
from error_rule import check_case, run_ours

from stable_attention import stable_attention

FAULTS = {
    "FA-334 backward NaN at length 1, d 16": "sq=1 sk=1 d=16",
    "FA-443 packed backward NaN, keys 1 against 256 queries":
        "layout=thd lens_q=80,70 lens_k=1,1 causal=0",
    "FA-1947 P of masked positions not zeroed": "layout=thd lens_q=33,7 lens_k=33,7 values=below",
    "pytorch-196678 dQ NaN when length % 128 == 64 and LSE < -88":
        "sq=64 sk=64 values=below d=32",
    "cudnn-1072 one query, 128 keys, LSE -122: dK, dV NaN": "sq=1 sk=128 values=below",
    "cudnn-160 K outlier of 70 at length 2": "sq=2 sk=2 values=outlier",
    "pytorch-109517 fully masked rows poison the gradients": "sq=60 sk=20 causal=1",
    "pytorch-158212 length not a multiple of the block, with LSE": "sq=65 sk=63 dlse=1 left=20",
    "FA-2324 tokens past the last sequence stay unwritten":
        "layout=thd lens_q=20,11 lens_k=20,11 unused=9 causal=1",
    "TE-3216 d 256, batch 2: wrong sign of dQ on outliers":
        "b=2 sq=20 sk=20 hq=1 hk=1 d=256 values=outlier causal=1",
    "FA-2541 views of one fused QKV projection": "sq=40 sk=40 memory=fused causal=1",
    "FA-2552 d_v off the reduce width": "sq=33 sk=33 d=64 dv=40",
    "FA-2706 dSink must include dLSE": "sq=40 sk=40 sinks=learned dlse=1",
    "TE-3249 sink with packed sequences and d_v 192":
        "layout=thd lens_q=9,20 lens_k=9,20 hq=1 hk=1 d=64 dv=192 sinks=learned causal=1",
    "nsa-27 head map of grouped queries": "sq=20 sk=20 hq=6 hk=3 d=32 dv=16",
    "ffpa-301 grouped dK and dV accumulate in float32": "sq=64 sk=40 hq=16 hk=1 values=positive",
    "FA-2860 launch grid far larger than the sequences":
        "layout=thd lens_q=3,2 lens_k=3,2 causal=1 unused=60",
    "FA-2562 no queries in any sequence": "layout=thd lens_q=0,0 lens_k=3,4 unused=2",
    "FA-1254 no keys in any sequence": "layout=thd lens_q=3,4 lens_k=0,0 unused=2 sinks=learned",
    "expanded keys and values": "b=2 sq=20 sk=20 memory=expanded",
}  # fmt: skip


@pytest.mark.parametrize("line", FAULTS.values(), ids=[n.split()[0] for n in FAULTS])
def test_fault(line: str) -> None:
    check_case(Case.parse(line)).raise_if_bad()


@pytest.mark.parametrize(("sq", "sk", "b"), [(0, 5, 1), (5, 0, 1), (0, 0, 2), (4, 4, 0)])
def test_fa_2568_zero_lengths(sq: int, sk: int, b: int) -> None:
    """O = 0, LSE = -inf, gradients exist and are zero; nothing crashes or hangs."""
    q = torch.randn(b, sq, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(b, sk, 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out, lse = stable_attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and not out.any() if sk == 0 else out.shape == q.shape
    assert lse.shape == (b, 2, sq)
    if sk == 0:
        assert bool((lse == -torch.inf).all())
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape and not grad.any() if b * sq * sk == 0 else True


def test_fa_2752_sink_with_rows_without_keys_and_a_huge_sink() -> None:
    """LSE of a row without keys is the sink, not NaN; a sink of 100 does not overflow."""
    case = Case(sq=12, sk=4, causal=1, hq=2, hk=2, sinks="learned", dlse=1)
    given = make_inputs(case)
    given.sinks = torch.tensor([100.0, -100.0])
    ours = run_ours(case, given)
    # A row without keys still has its sink: LSE is the sink itself.
    torch.testing.assert_close(ours.lse[0, 0], torch.full((12,), 100.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.lse[0, 1, :8], torch.full((8,), -100.0), rtol=1e-6, atol=0)
    assert all(bool(torch.isfinite(x).all()) for n, x in ours.named().items() if n != "max_logits")
    assert not ours.out[:, :8].any()


def test_te_1197_window_bounds_are_inclusive() -> None:
    """Each query sees exactly left + 1 + right keys where the sequence has them."""
    n = 21
    q = torch.zeros(1, n, 1, 32, dtype=torch.bfloat16)
    v = torch.zeros(1, n, 1, 32, dtype=torch.bfloat16)
    v[0, :, 0, :n] = torch.eye(n)
    for left, right, causal in ((3, 2, False), (0, 0, False), (4, 9, True), (-1, 1, False)):
        out = stable_attention(q, q, v, window=(left, right), causal=causal)[0, :, 0, :n]
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        seen = (j <= i + (0 if causal else right)) & ((j >= i - left) if left >= 0 else True)
        assert torch.equal(out > 0, seen), (left, right, causal)


def test_olmo_828_recomputation_draws_the_same_dropout_mask() -> None:
    q, k, v = (torch.randn(1, 40, 2, 32, dtype=torch.bfloat16).requires_grad_() for _ in range(3))

    def block(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return stable_attention(a, b, c, dropout_p=0.3, dropout_seed=11, causal=True)

    plain = block(q, k, v)
    again = torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)
    assert torch.equal(plain, again)
    dout = torch.randn_like(plain)
    direct = torch.autograd.grad(plain, (q, k, v), dout)
    recomputed = torch.autograd.grad(again, (q, k, v), dout)
    assert all(torch.equal(a, b) for a, b in zip(direct, recomputed, strict=True))


def test_fa_2706_gradient_of_lse_alone() -> None:
    """dV is exactly zero, and dQ, dK are right, when only LSE was used."""
    q, k, v = (torch.randn(1, 20, 2, 32, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    _, lse = stable_attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert not dv.any()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    from stable_attention.reference import oracle_attention

    truth = oracle_attention(*wide, causal=True).lse
    for got, want in zip((dq, dk), torch.autograd.grad(truth.sum(), wide[:2]), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 5e-3


def test_fa_unaligned_base_pointer_and_padded_rows() -> None:
    case = Case(sq=33, sk=33, causal=1)
    given = make_inputs(case)
    want = run_ours(case, given)
    for name in ("q", "k", "v", "dout"):
        x = getattr(given, name)
        room = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype)
        room[1:] = x.flatten()
        setattr(given, name, room[1:].view(x.shape))
    found = run_ours(case, given)
    for name, x in want.named().items():
        assert torch.equal(getattr(found, name), x), name


def test_half_precision_row_of_zeros_keeps_int8_residual_finite() -> None:
    """O = 0 has no exponent to scale int8 codes by: no division by zero, no NaN in delta."""
    case = Case(sq=20, sk=8, causal=1, residual="int8")
    given = make_inputs(case)
    given.v[:, :4] = 0
    with torch.no_grad():
        low = stable_attention(
            given.q, given.k, given.v, causal=True, residual="int8", return_residual=True
        )[1]
    assert low.dtype == torch.int8 and not low[:, :12].any()
    assert bool(torch.isfinite(run_ours(case, given).dq).all())
