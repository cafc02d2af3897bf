"""Backward passes of other libraries with our delta, on the GPU: errors, edges, no host wait.

FlashAttention-4 is tested where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from regimes import REGIMES, make_regime

from stable_attention import configs, fa4, stable_attention, vendors
from stable_attention.carriers import carrier
from stable_attention.reference.carrier import carrier as reference_carrier

pytestmark = pytest.mark.gpu

NAMES = ("sdpa_cudnn", "sdpa_flash", "fa4")
Gradients = tuple[torch.Tensor, ...]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    arch = configs.arch_of(torch.device(DEVICE, torch.cuda.current_device()))
    if not any(row.name == request.param and arch in row.archs for row in vendors.VENDORS):
        pytest.skip(f"{request.param} is not listed for {arch}")
    if request.param == "fa4" and fa4.missing():
        pytest.skip(fa4.missing())
    return request.param


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _gradients(tensors: Any, **options: Any) -> Gradients:
    *inputs, dout = tensors
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = stable_attention(*inputs, **options)
    assert isinstance(out, torch.Tensor)
    return torch.autograd.grad(out, inputs, dout)


def _exact(tensors: Any, causal: bool) -> Gradients:
    *inputs, dout = (x.double() for x in tensors)
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v = inputs
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ v, inputs, dout)


def _errors(found: Gradients, exact: Gradients) -> list[float]:
    return [
        float((x.double() - y.double()).norm() / y.double().norm())
        for x, y in zip(found, exact, strict=True)
    ]


def _drawn(
    dtype: torch.dtype = torch.bfloat16, s: int = 384, d: int = 64, kv_heads: int = 4
) -> Any:
    """q, k, v and dO, bshd, a batch of 2 and 4 heads."""
    generator = torch.Generator().manual_seed(d)
    return [
        torch.randn(2, s, h, d, generator=generator).to(DEVICE, dtype)
        for h in (4, kv_heads, kv_heads, 4)
    ]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n", [512, 2048])
@pytest.mark.parametrize("regime", REGIMES)
def test_errors_are_within_a_tenth_of_our_own(name: str, regime: str, n: int, d: int) -> None:
    tensors = [x[None] for x in make_regime(regime, heads=12, n=n, d=d, device=DEVICE)]
    exact = _exact(tensors, causal=True)
    own, found = (
        _errors(_gradients(tensors, layout="bhsd", causal=True, backward=x), exact)
        for x in ("own", name)
    )
    assert found[0] <= 1.1 * own[0], (found, own)
    # dK and dV have no part in delta where it is exact; vendors round their products in their way.
    assert found[1] <= 1.1 * own[1] + 1e-3, (found, own)
    assert found[2] <= 1.1 * own[2] + 1e-3, (found, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_layouts_and_grouped_queries(
    name: str, layout: str, causal: bool, dtype: torch.dtype
) -> None:
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[layout]
    tensors = [x.permute(order).contiguous() for x in _drawn(dtype, kv_heads=2)]
    own, found = (
        _gradients(tensors, layout=layout, causal=causal, backward=x) for x in ("own", name)
    )
    assert max(_errors(found, own)) < 0.01
    assert [x.stride() for x in found] == [x.stride() for x in own]


@pytest.mark.parametrize("size", [1e-8, 1e-20, 1e4])
def test_the_scale_of_gradients(name: str, size: float) -> None:
    tensors = _drawn()
    tensors[3] = tensors[3] * size
    own, found = (_gradients(tensors, causal=True, backward=x) for x in ("own", name))
    assert max(_errors(found, own)) < 0.01


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_rows_of_few_columns(name: str, columns: int) -> None:
    """Without a carrier the whole call is our own; the host is never waited for."""
    tensors = _drawn()
    tensors[3][1, 5, 2, columns:] = 0
    own = _gradients(tensors, causal=True, backward="own")
    _gradients(tensors, causal=True, backward=name)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = _gradients(tensors, causal=True, backward=name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert max(_errors(found, own)) < 0.01


def test_half_precision_out_of_range_is_served_by_our_own() -> None:
    """dO of 1e-6 beside an O of 1e3 and more: delta / dO is no FP16 number."""
    tensors = _drawn(torch.float16)
    tensors[2] = tensors[2] * 0 + 3e4
    tensors[3] = tensors[3] * 0 + 2e-6
    own, found = (_gradients(tensors, causal=True, backward=x) for x in ("own", "sdpa_flash"))
    assert all(bool(x.isfinite().all()) for x in found)
    torch.testing.assert_close(found[2], own[2], rtol=0.01, atol=1e-7)


def test_sinks(name: str) -> None:
    tensors = _drawn()
    sinks = torch.randn(4, device=DEVICE)
    own, found = (_gradients(tensors, causal=True, sinks=sinks, backward=x) for x in ("own", name))
    assert max(_errors(found, own)) < 0.01


def test_windows_of_fa4(name: str) -> None:
    if name != "fa4":
        pytest.skip("torch's operators have no windows")
    tensors = _drawn()
    for window in ((63, 0), (32, 32)):
        own, found = (_gradients(tensors, window=window, backward=x) for x in ("own", name))
        assert max(_errors(found, own)) < 0.01


@pytest.mark.usefixtures("deterministic")
def test_what_is_asked_to_repeat_repeats(name: str) -> None:
    if name == "sdpa_cudnn":
        pytest.skip("does not repeat, and is refused")
    tensors = _drawn(s=2048)
    options: dict[str, Any] = {"causal": True, "deterministic": True, "backward": name}
    first = _gradients(tensors, **options)
    assert all(all(map(torch.equal, first, _gradients(tensors, **options))) for _repeat in range(5))


def test_fa4_as_it_is() -> None:
    if fa4.missing():
        pytest.skip(fa4.missing())
    *inputs, dout = _drawn()
    inputs = [x.requires_grad_() for x in inputs]
    out = fa4.attention(*inputs, scale=0.125, window=(-1, 0), deterministic=False)
    found = torch.autograd.grad(out, inputs, dout)
    own = _gradients((*inputs, dout), causal=True, scale=0.125, stabilizer="none", backward="own")
    assert max(_errors(found, own)) < 0.02


def test_a_graph_holds_a_borrowed_backward() -> None:
    tensors = _drawn()
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]

    def step() -> Gradients:
        out = stable_attention(*leaves, causal=True, backward="sdpa_flash")
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, leaves, tensors[3])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert max(_errors(found, expected)) < 0.01


@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_carries_what_the_reference_carries(dtype: torch.dtype, d: int) -> None:
    dout = _drawn(dtype, d=d)[3]
    delta = torch.randn(2, 384, 4, device=DEVICE)
    found, lacking = carrier(dout, delta.transpose(1, 2))
    expected, missing = reference_carrier(dout, delta)
    assert not lacking and not missing.any()
    for x in (found, expected):
        carried = (dout.float() * x.float()).sum(-1)
        torch.testing.assert_close(carried, delta, rtol=3e-7, atol=2**-22)
    assert torch.equal(found != 0, expected != 0) or int((found != 0).sum(-1).max()) <= 3
