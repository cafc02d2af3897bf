"""Gates on the delta error of the default stabilizer, and vendor kernels beside it.

benchmarks/delta_regimes.py runs the full table (to 32k, all backends) for docs/numerics.md.
"""

from __future__ import annotations

import pytest
import torch

from stable_attention.probes import BackendResult, probe
from stable_attention.reference.regimes import REGIMES, SINK_REGIMES, make_regime

pytestmark = pytest.mark.gpu


def _ours(tensors, stabilizer="compensated"):
    from stable_attention import stable_attention

    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out, lse, low = stable_attention(
        *leaves, layout="bhsd", causal=True, stabilizer=stabilizer, deterministic=True,
        return_lse=True, return_residual=True,
    )  # fmt: skip
    dq, dk, _ = torch.autograd.grad(out, leaves, tensors[3])
    result = BackendResult(out=out, lse=lse, low=low, dq=dq, dk=dk)
    return probe(*tensors, backend=result, layout="bhsd", causal=True, skip_rows=64)


@pytest.mark.parametrize("n", [512, 2048, 8192])
@pytest.mark.parametrize("name", REGIMES)
def test_delta_error(name: str, n: int) -> None:
    heads = 48 if n < 8192 else 16
    tensors = [x[None] for x in make_regime(name, heads=heads, n=n, device="cuda")]
    ours, plain = _ours(tensors), _ours(tensors, "none")
    if name in SINK_REGIMES:
        assert ours.rms <= 1e-4
        assert abs(ours.mean) <= 1e-5
    if name == "gauss":
        assert ours.rms <= 0.7 * plain.rms
    if name == "one":
        assert ours.dq_error < 0.1 < plain.dq_error


def test_a_peer_that_still_fails_where_ours_does_not() -> None:
    """pytorch #196678: cuDNN's dQ is NaN for L % 128 == 64 with a mask and LSE < -88.7.

    Ours must be finite whatever the installed cuDNN does; what it does is printed.
    """
    from stable_attention import stable_attention

    n, d = 192, 64
    torch.manual_seed(0)
    q, k = (torch.randn(1, 4, n, d, device="cuda") for _ in range(2))
    q[..., 0], k[..., 0] = 40.0, -40.0
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, torch.randn_like(q)))
    out = stable_attention(q, k, v, layout="bhsd", causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(torch.isfinite(x).all()) for x in (out, *grads))
    mask = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()
    backend = torch.nn.attention.SDPBackend.CUDNN_ATTENTION
    try:
        with torch.nn.attention.sdpa_kernel(backend):
            peer = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            dq = torch.autograd.grad(peer.sum(), q)[0]
        print("cuDNN dQ finite:", bool(torch.isfinite(dq).all()))
    except RuntimeError as error:
        print("cuDNN does not serve the case:", str(error).splitlines()[0])
