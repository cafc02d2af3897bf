"""Gradients of q, k and v that are pieces of one tensor are pieces of one tensor as well."""

from __future__ import annotations

import pytest
import torch
from memory_poison import PoisonedMemory
from side_by_side import LAYOUTS, gradients, in_one_buffer, projected

from stable_attention import ops, stable_attention
from stable_attention.pieces import joined


@pytest.mark.parametrize(
    ("layout", "widths", "stabilizer"),
    [*((x, (16, 16), "compensated") for x in LAYOUTS), (LAYOUTS[-1], (24, 8), "none")],
)
def test_same_bits_as_separate_tensors(layout, widths, stabilizer):
    q, k, v = projected(layout, d=widths[0], dv=widths[1])
    assert joined((q, k, v)) is not None
    apart = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    assert joined(apart) is None
    want = gradients(*apart, layout=layout, stabilizer=stabilizer)
    with PoisonedMemory():
        got = gradients(q, k, v, layout=layout, stabilizer=stabilizer)
    assert in_one_buffer(got[:3])
    assert not in_one_buffer(want[:3])
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


def test_pieces_are_joined_without_a_copy():
    whole = torch.randn(3, 2, 4, 24)
    for dim, sizes in ((-1, [8, 8, 8]), (3, [16, 4, 4]), (-1, [24]), (0, [1, 2])):
        found = joined(whole.split(sizes, dim), dim)
        assert found.data_ptr() == whole.data_ptr() and torch.equal(found, whole)


def test_no_tokens():
    q, k, v = (x[:, :0] for x in projected("bshd", d=16, dv=8))
    got = gradients(q, k, v, layout="bshd")
    assert [x.shape for x in got[:3]] == [x.shape for x in (q, k, v)]


def test_what_is_not_side_by_side():
    q, k, v = projected("bshd", d=16, dv=16)
    whole = torch.randn(2, 40, 2, 64).bfloat16()
    heads = torch.randn(2, 40, 4, 16).bfloat16()
    for name, found in {
        "another order": (k, q, v),
        "one twice": (q, k, k),
        "a gap behind": whole[..., :48].split(16, -1),
        "a gap between": (whole[..., :16], whole[..., 32:48], whole[..., 48:]),
        "side by side in heads": (heads[:, :, :2], heads[:, :, 2:3], heads[:, :, 3:]),
        "tokens left out": [x[:, ::2] for x in (q, k, v)],
        "copied": (q, k.clone(), v),
        "other strides": (q, k.contiguous(), v.contiguous()),
        "expanded": [x[:1].expand(2, -1, -1, -1) for x in (q, k, v)],
        "another type": (q, k, v.float()),
    }.items():
        assert joined(found) is None, name
    # Strides of extents of 1 are anybody's.
    one = torch.randn(1, 1, 1, 48).bfloat16()
    assert joined(one.as_strided((1, 1, 1, 48), (7, 5, 3, 1)).split(16, -1)) is not None


def test_leaves_keep_gradients_of_their_own():
    """What is a leaf, although a view, accumulates into tensors that share nothing."""
    q, k, v = projected("bshd", d=16, dv=16)
    for _ in range(2):
        stable_attention(q, k, v, causal=True).float().square().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    assert not in_one_buffer(grads)
    want = torch.autograd.grad(
        stable_attention(q, k, v, causal=True).float().square().sum(), (q, k, v)
    )
    assert all(torch.equal(a, 2 * b) for a, b in zip(grads, want, strict=True))


def test_compiled_code_gives_the_same_bits():
    """Traced tensors share no memory that one may count on, whatever they share when it runs."""
    whole = torch.randn(1, 20, 2, 48).bfloat16().requires_grad_()

    def run(x):
        return stable_attention(*x.split(16, -1), causal=True).float().square().sum()

    (want,) = torch.autograd.grad(run(whole), whole)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(whole), whole)
    assert torch.equal(got, want)
    pieces = torch.compile(
        lambda q, k, v: stable_attention(q, k, v, causal=True).float().square().sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = whole.split(16, -1)
    assert joined((q, k, v)) is not None
    (got,) = torch.autograd.grad(pieces(q, k, v), whole)
    assert torch.equal(got, want)


def test_batched_gradients():
    """Several dO at once (is_grads_batched): vmap runs the operator once for each."""
    q, k, v = projected("bshd", d=16, dv=8)
    out = stable_attention(q, k, v, causal=True)
    douts = torch.randn(3, *out.shape).bfloat16()
    got = torch.autograd.grad(out, (q, k, v), douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        want = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(got, want, strict=True))


def test_opcheck(monkeypatch):
    seen = []
    operator = ops.backward_op
    monkeypatch.setattr(ops, "_unseen", lambda tensors: False)
    monkeypatch.setattr(ops, "backward_op", lambda *a: seen.append(a) or operator(*a))
    gradients(*projected("bshd", d=16, dv=8), layout="bshd")
    (arguments,) = seen
    assert arguments[-1] is True
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(operator, tuple(arguments))
