"""`cure` and `cured`: PyTorch's own attention, on a CPU, with our delta in its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from regimes import make_regime
from torch.nn import functional

import stable_attention
from stable_attention import ops
from stable_attention.carriers import carrier

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CAUSAL: Attention = functools.partial(functional.scaled_dot_product_attention, is_causal=True)


class Layer(torch.nn.Module):
    """A plain layer of somebody's model: projections around PyTorch's attention."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv = torch.nn.Linear(32, 3 * 32, dtype=torch.bfloat16)
        self.proj = torch.nn.Linear(32, 32, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, 16).permute(2, 0, 3, 1, 4)
        out = self.attention(q, k, v).transpose(1, 2)
        return x + self.proj(out.reshape(b, s, 32))


def _cured(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return stable_attention.cured(CAUSAL, q, k, v, layout="bhsd", causal=True)


def _dq(attention: Attention, inputs: list[torch.Tensor], dout: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    return torch.autograd.grad(attention(q, k, v), q, dout)[0].double()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "pytorch"])
@pytest.mark.parametrize("name", ["one", "near2"])
def test_dq_of_a_sink(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(ops, "interpreting", lambda: False)
    *inputs, dout = (x[None] for x in make_regime(name, heads=1, n=96))
    exact = _dq(CAUSAL, [x.double() for x in inputs], dout.double())
    plain, cured = (
        float((_dq(f, inputs, dout) - exact).norm() / exact.norm()) for f in (CAUSAL, _cured)
    )
    assert cured < 0.35 * plain
    assert cured < 0.2


def test_a_plain_model_trains_with_it_and_its_outputs_are_its_own() -> None:
    found = {}
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, attention in (("plain", CAUSAL), ("cured", _cured)):
        torch.manual_seed(3)
        layer = Layer(attention)
        out = layer(x)
        out.float().square().mean().backward()
        found[name] = [out.detach(), *(p.grad for p in layer.parameters())]
    assert torch.equal(found["plain"][0], found["cured"][0])
    for one, other in zip(found["plain"][1:], found["cured"][1:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=1e-4)
    assert not torch.equal(found["plain"][1], found["cured"][1])


def test_the_output_may_be_a_view_and_the_graph_run_twice() -> None:
    *inputs, dout = (x[None] for x in make_regime("one", heads=1, n=32))
    q, k, v = (x.clone().requires_grad_() for x in inputs)

    def flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return CAUSAL(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)

    expected = torch.autograd.grad(_cured(q, k, v), q, dout)[0]
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out = stable_attention.cured(flat, *rows, layout="bshd", causal=True)
    assert out.shape == (1, 32, 64)
    gradient = dout.transpose(1, 2).flatten(2)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(out, q, gradient, retain_graph=True)[0], expected)


class _Fused(torch.autograd.Function):
    """Saves what Transformer Engine's fused attention saves in 16 bits, and as it does."""

    @staticmethod
    def forward(ctx, q, k, v):
        order = (1, 2, 0, 3)  # sbhd to bhsd
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.permute(order) for x in (q, k, v)), 0.0, True
        )
        out = out.permute(2, 0, 1, 3).contiguous()
        ctx.save_for_backward(None, q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        _, *saved, lse = ctx.saved_tensors
        rows = (x.permute(1, 2, 0, 3) for x in (dout, *saved))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse, 0.0, True
        )
        return tuple(x.permute(2, 0, 1, 3) for x in found)


def test_an_autograd_function_whose_caller_flattens_heads() -> None:
    """Transformer Engine's modules return [s, b, h * d], a view of what its function saved."""
    *inputs, dout = (x[None].permute(2, 0, 1, 3) for x in make_regime("one", heads=1, n=32))
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out = stable_attention.cured(
        lambda *x: _Fused.apply(*x).flatten(2), q, k, v, layout="sbhd", causal=True
    )
    found = torch.autograd.grad(out, q, dout.flatten(2))[0]
    rows = [x.detach().permute(1, 2, 0, 3).requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(_cured(*rows), rows[0], dout.permute(1, 2, 0, 3))[0]
    torch.testing.assert_close(found.permute(1, 2, 0, 3), expected, rtol=0.02, atol=1e-6)


def test_an_attention_that_saves_no_output_is_refused() -> None:
    q = torch.randn(1, 1, 8, 16, requires_grad=True).bfloat16()

    def unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v

    with pytest.raises(ValueError, match="saves no tensor in the memory of its output"):
        stable_attention.cured(unfused, q, q, q, layout="bhsd")
    with torch.no_grad():
        stable_attention.cured(unfused, q, q, q, layout="bhsd")


def test_hooks_of_the_output_that_change_its_gradient() -> None:
    *inputs, dout = (x[None] for x in make_regime("one", heads=1, n=32))
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    kept = torch.rand(dout.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    expected = torch.autograd.grad(_cured(q, k, v), q, dout * kept)[0]
    out = _cured(q, k, v)
    out.register_hook(lambda dout: dout * kept)
    assert torch.equal(torch.autograd.grad(out, q, dout)[0], expected)


@pytest.mark.parametrize("flat", [False, True])
def test_hooks_that_run_behind_the_carrier_are_refused(flat: bool) -> None:
    """A hook of the node, registered later, changed dO after the carrier was made for it."""
    q, k, v = (torch.randn(1, 2, 8, 16).bfloat16().requires_grad_() for _ in range(3))

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        return CAUSAL(*qkv).flatten() if flat else CAUSAL(*qkv)

    out = stable_attention.cured(attention, q, k, v, layout="bhsd", causal=True)
    hook = out.grad_fn.register_prehook(lambda douts: tuple(3 * x for x in douts))
    with pytest.raises(RuntimeError, match=r"Use out\.register_hook"):
        out.sum().backward(retain_graph=True)
    hook.remove()
    out.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_k"])
def test_what_was_changed_in_place_is_refused_by_the_backward(name: str) -> None:
    """Autograd's own check does not see what hooks have packed."""
    q, k, v = torch.randn(3, 1, 8, 2, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    q.requires_grad_()
    cu = torch.tensor([0, 8], dtype=torch.int32)
    given = {"q": q * 1, "k": k, "v": v, "cu_seqlens_k": cu.clone()}

    def attention(*x: torch.Tensor) -> torch.Tensor:
        # Of a cast copy autograd saves nothing that a change of q, k or v would reach.
        return CAUSAL(*(y.clone()[None].transpose(1, 2) for y in x)).transpose(1, 2)[0]

    out = stable_attention.cured(
        attention, *(given[x][0] for x in "qkv"), layout="thd", causal=True,
        cu_seqlens_q=cu, cu_seqlens_k=given["cu_seqlens_k"],
    )  # fmt: skip
    with torch.no_grad():
        given[name].mul_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* allowed: "):
        out.sum().backward()


def test_what_the_attention_alone_saved_is_refused_too() -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    inner: list[torch.Tensor] = []

    def attention(*x: torch.Tensor) -> torch.Tensor:
        inner.extend(y * 1 for y in x)
        return CAUSAL(*inner)

    out = stable_attention.cured(attention, q.requires_grad_(), k, v, layout="bhsd", causal=True)
    inner[1].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "pytorch"])
def test_under_autocast(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(ops, "interpreting", lambda: False)
    *inputs, dout = (x[None] for x in make_regime("one", heads=1, n=32))
    expected = _dq(_cured, inputs, dout)

    def cast(*x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _cured(*x)

    assert torch.equal(_dq(cast, [x.float() for x in inputs], dout), expected)
    with pytest.raises(ValueError, match=r"O's dtype is torch.float32; allowed: torch\.bfloat16"):
        _cured(*(x.float().requires_grad_() for x in inputs))


def test_a_backward_under_autocast_of_another_dtype() -> None:
    """Delta was that of O in the other dtype."""
    *inputs, dout = (x[None] for x in make_regime("one", heads=1, n=32))
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out = _cured(q, k, v)
    with torch.autocast("cpu", torch.float16):
        (found,) = torch.autograd.grad(out, q, dout)
    assert torch.equal(found, _dq(_cured, inputs, dout))


def test_wrong_keywords_are_refused_before_the_backward() -> None:
    q = torch.randn(1, 2, 8, 16).bfloat16()
    with pytest.raises(TypeError, match="take no casual"):
        stable_attention.cured(CAUSAL, q, q, q, layout="bhsd", casual=True)
    for wrong in ({"layout": "bhds"}, {"causal": "yes"}, {"window": 3}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; allowed: "):
            stable_attention.cured(CAUSAL, q, q, q, **{"layout": "bhsd"} | wrong)
    q.requires_grad_()
    cu = torch.tensor([0, 8], dtype=torch.int32)
    for name, wrong in {"cu_seqlens_q": {"cu_seqlens_q": cu}, "sinks": {"sinks": q[0]}}.items():
        with pytest.raises(ValueError, match=f"{name} is .*; allowed: "):
            stable_attention.cured(CAUSAL, q, q, q, layout="bhsd", **wrong)


def test_what_is_no_output_of_attention_is_refused() -> None:
    q = torch.randn(1, 2, 8, 16).bfloat16().requires_grad_()
    for attention, text in {
        lambda *qkv: (CAUSAL(*qkv), None): r"returned .*; allowed: O alone",
        lambda *qkv: CAUSAL(*qkv)[:, :1]: r"O is .*; allowed: \(1, 2, 8, 16\)",
    }.items():
        with pytest.raises(ValueError, match=text):
            stable_attention.cured(attention, q, q, q, layout="bhsd")
    with pytest.raises(ValueError, match=r"q, k and v are .*; allowed: tensors"):
        stable_attention.cured(CAUSAL, q, q, None, layout="bhsd")


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "pytorch"])
def test_what_a_carrier_is_asked_for(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(ops, "interpreting", lambda: False)
    dout = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    delta = dout.float().sum(-1).transpose(1, 2)
    out, lacking = carrier(dout, delta)
    assert not lacking
    torch.testing.assert_close((dout.float() * out.float()).sum(-1).transpose(1, 2), delta)
    dout[0, 0, 0] = 0
    assert carrier(dout, torch.ones_like(delta)).lacking
    with pytest.raises(ValueError, match=r"delta is a torch.float32 tensor.*shape \(2, 3, 5\)"):
        carrier(dout, delta.transpose(1, 2))
    with pytest.raises(ValueError, match="float32 needs no carrier"):
        carrier(dout.float(), delta)
    with pytest.raises(TypeError, match="take no dropout_p"):
        stable_attention.cure(dout, dout, dout, dout, dropout_p=0.1)
    with pytest.raises(ValueError, match="v is None"):
        stable_attention.cure(dout, dout, None, dout)
    for wrong in (dout[:, :4], dout[:1], dout[:, :, :1], dout[..., :8], dout.to("meta")):
        with pytest.raises(ValueError, match=r"dout is a .* allowed: a tensor of shape \(2, 5, 3"):
            stable_attention.cure(dout, dout, dout, wrong)


def test_packed_sequences() -> None:
    q, k, v, dout = torch.randn(4, 20, 2, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    packed = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 13}
    found, lacking = stable_attention.cure(q, k, v, dout, layout="thd", **packed)
    assert not lacking
    alone = stable_attention.cure(*(x[None, 7:] for x in (q, k, v, dout)), causal=True).out
    assert torch.equal(found[7:], alone[0])


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "pytorch"])
def test_rows_that_see_no_key_carry_nothing(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr(ops, "interpreting", lambda: False)
    q, k, v, dout = torch.randn(
        4, 1, 12, 2, 16, generator=torch.Generator().manual_seed(5)
    ).bfloat16()
    found, lacking = stable_attention.cure(q, k[:, :8], v[:, :8], dout, causal=True)
    assert not lacking
    assert not found[:, :4].any() and found[:, 4:].any(-1).all()


def test_gradients_that_are_views_which_negate() -> None:
    inputs, dout = list(torch.randn(3, 1, 2, 24, 16).bfloat16()), torch.randn(1, 2, 24, 16)
    dout = dout.bfloat16()
    assert torch.equal(_dq(_cured, inputs, torch._neg_view(dout)), _dq(_cured, inputs, -dout))
    delta = torch.randn(1, 2, 24)
    got, want = (carrier(dout, x, layout="bhsd").out for x in (torch._neg_view(delta), -delta))
    assert torch.equal(got, want)


def test_nothing_to_attend() -> None:
    """A batch of none: it was said to save no output."""
    q, k, v = (torch.zeros(0, 2, 24, 16).bfloat16().requires_grad_() for _ in range(3))
    gradients = torch.autograd.grad(_cured(q, k, v).sum(), (q, k, v))
    assert [x.shape for x in gradients] == [q.shape] * 3


class Twice(torch.autograd.Function):
    """Attention with a backward pass that autograd can follow."""

    @staticmethod
    def forward(ctx, q, k, v):
        p = (q.float() @ k.float().mT / 4).softmax(-1)
        out = (p @ v.float()).to(q.dtype)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, dout = (x.float() for x in (*ctx.saved_tensors, dout))
        p = (q @ k.mT / 4).softmax(-1)
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / 4
        return tuple(x.to(ctx.saved_tensors[0].dtype) for x in (ds @ k, ds.mT @ q, p.mT @ dout))


@pytest.mark.parametrize("place", range(3))
def test_second_derivatives_are_refused(place: int) -> None:
    """They were made of the carrier, and wrong by a fifth and more."""
    inputs = [torch.randn(1, 2, 24, 16).bfloat16().requires_grad_() for _ in range(3)]
    x = inputs[place]
    out = stable_attention.cured(Twice.apply, *inputs, layout="bhsd")
    once = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(dx, once)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.square().sum() + x.sum(), x)
