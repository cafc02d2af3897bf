"""Observations on a GPU: every kernel against the float64 probe, and nothing that waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from megatron_cpu import core_attention
from regimes import make_regime

from megatron_patch.stability.sums import HeadSums, head_metrics
from stable_attention.probes import BackendResult, probe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]
N, HEADS, D = 512, 4, 64
SKIP = 64  # rows that `pick_rows` leaves out of N
KERNELS = [
    ("stable_flash", {"stabilizer": "compensated"}),
    ("stable_flash", {"stabilizer": "compensated", "o_lo": "int8"}),
    ("stable_flash", {"stabilizer": "none"}),
    ("sdpa_cudnn", {}),
    ("sdpa_flash", {}),
]


def watched(backend: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """A core-attention module and the observer on it."""
    from megatron_patch.stability.observe import Observer, Site

    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "use_cpu_initialization": False}
    module = core_attention(HEADS, D, backend=backend, options=options, **bf16)
    return module, Observer([Site(module, 0, "core_attention", torch.nn.Module())])


def observe(module: Any, observer: Any, regime: str) -> tuple[HeadSums, Any, tuple[Any, ...]]:
    """Sums after one forward and backward; what was seen; the inputs [s, 1, h, d]."""
    from megatron_patch.stability.observe import ObservationRequest

    q, k, v, do = (
        x.permute(1, 0, 2)[:, None].contiguous()
        for x in make_regime(regime, heads=HEADS, n=N, d=D, seed=1, device="cuda")
    )
    sums = HeadSums(
        layers=1, heads=HEADS, first_head=0, rows=N, sequences=1, device=torch.device("cuda")
    )
    kept: list[Any] = []

    def add(seen: Any, dout: torch.Tensor) -> None:
        kept.append(seen)
        sums.add(seen, dout)

    observer.arm([ObservationRequest(micro_batch=0, layers=None, callback=add)])
    q.requires_grad_()
    module(q, k, v, None).backward(do.flatten(2))
    observer.disarm()
    return sums, kept[0], (q.detach(), k, v, do)


@pytest.mark.parametrize(("backend", "options"), KERNELS, ids=str)
@pytest.mark.parametrize("regime", ["tie2s", "near2", "diffuse"])
def test_errors_are_those_of_the_probe(backend, options, regime):
    module, observer = watched(backend, options)
    sums, seen, inputs = observe(module, observer, regime)
    found = head_metrics(*(x.cpu().numpy() for x in sums.totals()))
    scores = torch.einsum("sbhd,tbhd->bhst", inputs[0].float(), inputs[1].float()) * D**-0.5
    mask = torch.ones(N, N, dtype=torch.bool, device="cuda").triu(1)
    top = scores.masked_fill(mask, -torch.inf).amax((0, 2, 3)).cpu()
    np.testing.assert_allclose(found["max_logit"][0], top, rtol=1e-3)
    for h in range(HEADS):
        one = [x[:, :, h : h + 1] for x in inputs]
        low = None if seen.low is None else seen.low[:, :, h : h + 1]
        result = BackendResult(out=seen.out[:, :, h : h + 1], low=low)
        want = probe(*one, backend=result, layout="sbhd", causal=True, skip_rows=SKIP)
        # 1e-6: float32 attention against float64, relative to RMS(delta).
        assert found["used_error_rms"][0, h] == pytest.approx(want.rms, rel=0.03, abs=2e-6)
        assert found["used_error_mean"][0, h] == pytest.approx(want.mean, rel=0.03, abs=1e-6)
        assert found["kappa"][0, h] == pytest.approx(want.kappa, rel=0.02)


@pytest.mark.parametrize(("backend", "options"), KERNELS, ids=str)
def test_an_observation_never_waits_for_the_device(backend, options):
    module, observer = watched(backend, options)
    observe(module, observer, "near2")  # compiles the kernels
    q, k, v = (torch.randn(N, 1, HEADS, D, device="cuda").bfloat16() for _ in range(3))
    do = torch.randn(N, 1, HEADS * D, device="cuda").bfloat16()
    q.requires_grad_()
    from megatron_patch.stability.observe import ObservationRequest

    sums = HeadSums(
        layers=1, heads=HEADS, first_head=0, rows=32, sequences=1, device=torch.device("cuda")
    )
    observer.arm([ObservationRequest(micro_batch=0, layers=None, callback=sums.add)])
    module(q, k, v, None).backward(do)  # shapes of this test, once
    sums.totals()
    observer.arm([ObservationRequest(micro_batch=0, layers=None, callback=sums.add)])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums.clear(phase=3)
        module(q, k, v, None).backward(do)
        found, _ = sums.totals()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    observer.disarm()
    assert float(found[..., 0].sum()) > 0


def test_norms_and_their_way_to_the_host_never_wait():
    """Spectral norms from the first time on; then reduction results on their way, slot by slot."""
    from types import SimpleNamespace

    from megatron_patch.stability.reduction import Reduction
    from megatron_patch.stability.weights import SpectralNorms

    attention = SimpleNamespace(
        linear_qkv=SimpleNamespace(weight=torch.randn(3 * HEADS * D, 128, device="cuda")),
        num_attention_heads_per_partition=HEADS,
        num_query_groups_per_partition=HEADS,
        hidden_size_per_attention_head=D,
    )
    sites: Any = [SimpleNamespace(attention=attention)] * 2
    SpectralNorms(sites).measure()
    norms = SpectralNorms(sites)
    sender = Reduction()
    sender._to_host(0, torch.zeros(64, device="cuda"))  # allocates the pinned memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = norms.measure()
        arrived = []
        for i in range(4):
            # The source is freed at once and its memory used again: the copy comes before that.
            host = sender._to_host(0, torch.full((64,), float(i), device="cuda"))
            torch.full((64,), -1.0, device="cuda")
            event = torch.cuda.Event()
            event.record()
            event.synchronize()  # waits for the copy alone; what telemetry does a step later
            arrived.append(host.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [float(x.unique()) for x in arrived] == [0.0, 1.0, 2.0, 3.0]
    assert all(bool(torch.isfinite(x).all()) for _, x in found) and len(found) == 2
