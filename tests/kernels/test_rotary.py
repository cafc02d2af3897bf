"""The rotary kernel against float64, and beside Megatron-Core's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stable_attention.rotary import packed_positions, rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def angles_of(rows: int, r: int, *, interleaved: bool) -> torch.Tensor:
    steps = 10000.0 ** -(torch.arange(0, r, 2) / r)
    angle = torch.outer(torch.arange(rows).float(), steps)
    if interleaved:
        return angle.repeat_interleave(2, -1).to(DEVICE)
    return torch.cat((angle, angle), -1).to(DEVICE)


def exact(x, angles, *, pairs_in, pairs_out, scale=1.0):
    """x [s, b, h, d] turned by angles [s, r], in the type of x."""
    r = angles.shape[-1]
    cos, sin = ((f(angles.to(x.dtype)) * scale)[:, None, None] for f in (torch.cos, torch.sin))
    part, rest = x[..., :r], x[..., r:]
    if pairs_in:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part.chunk(2, -1)
    if pairs_out:
        cos, sin = cos[..., 0::2], sin[..., 0::2]
    else:
        cos, sin = cos[..., : r // 2], sin[..., : r // 2]
    a, b = a * cos - b * sin, b * cos + a * sin
    whole = torch.stack((a, b), -1).flatten(-2) if pairs_out else torch.cat((a, b), -1)
    return torch.cat((whole, rest), -1)


FORMS = {"half": (False, False), "interleaved": (True, False), "latent": (False, True)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "d", "r"), [(3, 16, 16), (17, 24, 12)])
def test_one_rounding_forward_and_backward(dtype, form, heads, d, r):
    """Results and gradients of strided views are the float64 results, rounded once."""
    interleaved, regroup = FORMS[form]
    pairs = {"pairs_in": interleaved or regroup, "pairs_out": interleaved}
    whole = torch.randn(5, 2, heads, 3 * d, device=DEVICE).to(dtype)
    x = whole[..., d : 2 * d].requires_grad_()
    angles = angles_of(5, r, interleaved=interleaved)
    grad = torch.randn(5, 2, d, heads, device=DEVICE).to(dtype).transpose(2, 3)
    out = rotary(x, angles, interleaved=interleaved, regroup=regroup, scale=1.25)
    (dx,) = torch.autograd.grad(out, x, grad)
    y = x.detach().double().requires_grad_()
    true = exact(y, angles, scale=1.25, **pairs)
    (dy,) = torch.autograd.grad(true, y, grad.double())
    assert out.is_contiguous() and out.dtype == dtype
    half = torch.finfo(dtype).eps / 2
    # float32 products of terms of this size come before the one rounding.
    terms = 2 * 2.0**-23 * max(t.abs().max().item() for t in (y, grad.double())) * 1.25
    for found, wanted in ((out, true), (dx, dy)):
        error = (found.double() - wanted).abs()
        bound = wanted.abs() * half + terms + torch.finfo(dtype).tiny
        assert (error <= bound).all(), (error - bound).max()


def test_it_is_more_exact_than_core():
    """Core rounds cosine, sine, both products and their sum to BF16."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    x = torch.randn(64, 1, 2, 64, device=DEVICE).bfloat16()
    angles = angles_of(64, 64, interleaved=False)
    true = exact(x.double(), angles, pairs_in=False, pairs_out=False)
    ours = (rotary(x, angles).double() - true).square().mean().sqrt()
    core = _apply_rotary_pos_emb_bshd(x, angles[:, None, None])
    core = (core.double() - true).square().mean().sqrt()
    assert 1.4 * ours < core


@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_tokens_count_from_the_start_of_their_sequence(cp_size):
    """Against core, on every rank of context parallelism; the gradient is the opposite turn."""
    from types import SimpleNamespace

    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    cu = torch.tensor([0, 8, 8, 12, 28], dtype=torch.int32, device=DEVICE)
    angles = angles_of(16, 8, interleaved=False)
    for rank in range(cp_size):
        tokens = 28 // cp_size
        x = torch.randn(tokens, 3, 8, device=DEVICE, requires_grad=True)
        places = packed_positions(cu, tokens, cp_size=cp_size, cp_rank=rank)
        out = rotary(x, angles, positions=places)
        group = SimpleNamespace(size=lambda: cp_size, rank=lambda rank=rank: rank)
        core = _apply_rotary_pos_emb_thd(x, cu, angles[:, None, None], cp_group=group)
        torch.testing.assert_close(out, core)
        grad = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (out, core))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("change", "text"), [
    ({"x": torch.zeros(2, 1, 1, 4, dtype=torch.float64)}, "float64"),
    ({"angles": torch.zeros(2, 3)}, "even"),
    ({"angles": torch.zeros(2, 6)}, "at most d"),
    ({"angles": torch.zeros(1, 4)}, "1 rows of angles for 2 tokens"),
    ({"interleaved": True, "regroup": True}, "choose one"),
    ({"angles": torch.zeros(2, 4, device="meta")}, "angles is on meta"),
    ({"angles": torch.zeros(2, 4, requires_grad=True)}, "no gradient for angles"),
    ({"scale": torch.ones((), requires_grad=True)}, "scale is .* wants a gradient"),
    ({"scale": "x"}, "scale is 'x'"),
    ({"x": [1.0]}, "x is a list; allowed: tensors"),
    ({"angles": 1.0}, "angles is a float; allowed: tensors"),
    ({"angles": torch.ones(())}, "at most d"),
    ({"positions": [0, 1]}, "positions is a list; allowed: tensors"),
    ({"positions": torch.zeros(1, dtype=torch.int32)}, "one for each of 2 tokens"),
    ({"positions": torch.zeros(2)}, "int32 positions"),
    ({"positions": torch.zeros(4, dtype=torch.int32)[::2]}, "contiguous int32"),
])  # fmt: skip
def test_arguments_are_refused_with_their_values(change, text):
    given = {"x": torch.zeros(2, 1, 1, 4), "angles": torch.zeros(2, 4)} | change
    with pytest.raises(ValueError, match=text):
        rotary(**given)


def test_views_that_negate():
    """As the imaginary part of conjugate angles is; memory has the opposite sign."""
    x, dout, other = (torch.randn(5, 1, 2, 8, device=DEVICE) for _ in range(3))
    angles = torch.complex(other[:, 0, 0], torch.randn(5, 8, device=DEVICE)).conj().imag
    assert angles.is_neg() and torch.equal(rotary(x, angles), rotary(x, angles.resolve_neg()))
    plain = torch._neg_view(-angles.contiguous())
    assert torch.equal(rotary(torch._neg_view(x), plain), -rotary(x, angles))
    out = rotary(x.requires_grad_(), angles)
    got, want = (torch.autograd.grad(out, x, g, True)[0] for g in (torch._neg_view(dout), -dout))
    assert torch.equal(got, want)


def test_positions_that_negate():
    x, angles = torch.randn(5, 1, 2, 8, device=DEVICE), angles_of(5, 8, interleaved=False)
    places = torch.tensor([4, 0, 3, 1, 2], dtype=torch.int32, device=DEVICE)
    want = rotary(x, angles, positions=places)
    assert torch.equal(rotary(x, angles, positions=torch._neg_view(-places)), want)


def test_ranks_that_are_none_are_refused():
    """They got the positions of a rank that is not theirs."""
    cu = torch.tensor([0, 8], dtype=torch.int32)
    for ranks in ((2, 2), (2, -1), (1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"cp_rank is {ranks[1]}; allowed: "):
            packed_positions(cu, 4, cp_size=ranks[0], cp_rank=ranks[1])
    for offsets in ([0, 8], cu[0]):
        with pytest.raises(ValueError, match=r"cu_seqlens is .*; allowed: "):
            packed_positions(offsets, 4)


def test_scales_of_other_libraries_count():
    x, angles = torch.randn(5, 1, 2, 8, device=DEVICE), angles_of(5, 8, interleaved=False)
    want = rotary(x, angles, scale=2.0)
    for scale in (2, np.float32(2), torch.tensor(2.0, device=DEVICE)):
        assert torch.equal(rotary(x, angles, scale=scale), want)


def test_second_derivatives_are_refused_where_there_are_any():
    """Asked for by their inputs alone, they were left out of a sum without a word."""
    x = torch.randn(5, 1, 2, 8, device=DEVICE, requires_grad=True)
    out = rotary(x, angles_of(5, 8, interleaved=False))
    (linear,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert not linear.requires_grad
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.square().sum() + x.sum(), x)
