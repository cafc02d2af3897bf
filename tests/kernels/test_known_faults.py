"""Faults that other attention implementations shipped, as regression tests of ours.

Each name carries the public issue or pull request. Faults of context parallelism and of training
stacks have their tests in those rooms.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE, Case, make_inputs
from error_rule import check_case, run_ours
from memory_poison import PoisonedMemory
from suite import FAULTS

from stable_attention import stable_attention
from stable_attention.probes import decode_o_lo


@pytest.mark.parametrize("line", FAULTS.values(), ids=[n.split()[0] for n in FAULTS])
def test_fault(line: str) -> None:
    check_case(Case.parse(line), again=False).raise_if_bad()


@pytest.mark.parametrize(("sq", "sk", "b"), [(0, 5, 1), (5, 0, 1), (0, 0, 2), (4, 4, 0)])
def test_fa_2568_zero_lengths(sq: int, sk: int, b: int) -> None:
    """O = 0, LSE = -inf, gradients exist and are zero; nothing crashes or hangs."""
    q = torch.randn(b, sq, 2, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    k, v = (
        torch.randn(b, sk, 2, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        for _ in range(2)
    )
    out, lse = stable_attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and not out.any() if sk == 0 else out.shape == q.shape
    assert lse.shape == (b, 2, sq)
    if sk == 0:
        assert bool((lse == -torch.inf).all())
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape and not grad.any() if b * sq * sk == 0 else True


def test_olmo_828_recomputation_draws_the_same_dropout_mask() -> None:
    q, k, v = (
        torch.randn(1, 40, 2, 32, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        for _ in range(3)
    )

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
    q, k, v = (
        torch.randn(1, 20, 2, 32, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
        for _ in range(3)
    )
    _, lse = stable_attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert not dv.any()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    from oracle import oracle_attention

    truth = oracle_attention(*wide, causal=True).lse
    for got, want in zip((dq, dk), torch.autograd.grad(truth.sum(), wide[:2]), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 5e-3


def test_fa_unaligned_base_pointer_and_padded_rows() -> None:
    case = Case(sq=33, sk=33, causal=1)
    given = make_inputs(case)
    want = run_ours(case, given)
    for name in ("q", "k", "v", "dout"):
        x = getattr(given, name)
        room = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=DEVICE)
        room[1:] = x.flatten()
        setattr(given, name, room[1:].view(x.shape))
    found = run_ours(case, given)
    for name, x in want.named().items():
        assert torch.equal(getattr(found, name), x), name


def test_half_precision_row_of_zeros_keeps_int8_o_lo_finite() -> None:
    """O = 0 has no exponent to scale int8 codes by: no division by zero, no NaN in delta."""
    case = Case(sq=20, sk=8, causal=1, o_lo="int8")
    given = make_inputs(case)
    given.v[:, :4] = 0
    with torch.no_grad():
        low = stable_attention(
            given.q, given.k, given.v, causal=True, o_lo="int8", return_o_lo=True
        )[1]
    # Whatever the code of an O = 0 is, it decodes to nothing.
    assert low.dtype == torch.int8
    empty = torch.zeros(low[:, :12].shape, dtype=torch.bfloat16, device=DEVICE)
    assert float(decode_o_lo(empty, low[:, :12]).abs().max()) < 1e-30
    assert bool(torch.isfinite(run_ours(case, given).dq).all())


@pytest.mark.parametrize("bound", [None, 4096])
def test_fa_2860_bounds_far_above_the_real_lengths(bound: int | None) -> None:
    """Tiles of a launch grid that no sequence fills must neither read nor write."""
    case = Case.parse("layout=thd lens_q=3,0,9 lens_k=5,2,9 causal=1 hq=2 hk=2")
    given = make_inputs(case)
    want = run_ours(case, given)
    leaves = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    named = given.arguments(case) | {"max_seqlen_q": bound, "max_seqlen_k": bound}
    with PoisonedMemory() as memory:
        out = stable_attention(*leaves, deterministic=True, **named)
        grads = torch.autograd.grad(out, leaves, given.dout)
    memory.check()
    for got, name in zip((out, *grads), ("out", "dq", "dk", "dv"), strict=True):
        assert torch.equal(got, getattr(want, name)), name
