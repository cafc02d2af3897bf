"""Sums of dK and dV that exact gradients obey: about 1 for them, large for a planted error."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.stability.key_sums import KeySums, key_metrics
from megatron_patch.stability.observe import Seen
from megatron_patch.stability.sampling import Geometry

S, B, H, KV, D = 96, 2, 4, 2, 16
SCALE = 0.25


def call(*, bias: float = 0.0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """(seen, dO, dK, dV, e) of causal attention in float32 whose gradients are stored in ``dtype``.

    ``bias`` of RMS(delta) is added to the delta of the first head's rows: e [b, h, s].
    """
    gen = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(S, B, heads, D, generator=gen).bfloat16().float()

    q, k, v, dout = draw(H), draw(KV), draw(KV), draw(H)
    rows, keys, values, do = (
        x.repeat_interleave(H // x.shape[2], 2).permute(1, 2, 0, 3) for x in (q, k, v, dout)
    )
    scores = (SCALE * rows @ keys.mT).masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    p = scores.softmax(-1)
    dp = do @ values.mT
    delta = (p * dp).sum(-1)
    e = torch.zeros_like(delta)
    e[:, 0] = bias * delta.square().mean().sqrt()
    ds = p * (dp - delta[..., None] - e[..., None])
    dk, dv = (
        (x.mT @ y).view(B, KV, H // KV, S, D).sum(2).permute(2, 0, 1, 3).to(dtype)
        for x, y in ((SCALE * ds, rows), (p, do))
    )
    seen = Seen(
        site=SimpleNamespace(layer=1),  # type: ignore[arg-type]
        q=q, k=k, v=v, out=dout, low=None, max_logits=None, sinks=None,
        geometry=Geometry(scale=SCALE, causal=True), dropout_p=0.0,
    )  # fmt: skip
    return replace(seen, **changes), dout, dk, dv, e


def measured(
    seen: Seen, dout: Any, dk: Any, dv: Any, *, cp: Any = None, device: str = "cpu"
) -> KeySums:
    sums = KeySums(layers=2, heads=H, first_head=0, cp=cp, device=torch.device(device))
    sums.add_output(seen, dout)
    sums.add_input(seen, "v", dv)
    sums.add_input(seen, "k", dk)
    return sums


def test_gradients_of_another_use_of_k_and_v():
    """The output of the call has none: the observed step ended in a KeyError."""
    seen, dout, dk, dv, _ = call()
    sums = measured(seen, dout, dk, dv)
    sums.clear()
    for name, gradient in (("k", dk + 1), ("v", dv)):
        sums.add_input(seen, name, gradient)
    assert all(math.isnan(x) for x in key_metrics(sums.totals().numpy())["dk_sum"].flat)
    sums.add_input(replace(seen, dropout_p=0.1), "v", dv)
    sums.totals()


def metrics(sums: KeySums) -> dict[str, Any]:
    return key_metrics(sums.totals().numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_gradients_leave_the_rounding_of_storing_them(dtype):
    found = metrics(measured(*call(dtype=dtype)[:4]))
    for name in ("dk_sum", "dv_sum"):
        assert (found[name][1] > 0.7).all() and (found[name][1] < 1.4).all(), found[name]
        assert math.isnan(found[name][0, 0])  # a layer that was not seen


def test_a_biased_delta_is_found_in_its_head_alone():
    seen, dout, dk, dv, e = call(bias=0.05)
    found = metrics(measured(seen, dout, dk, dv))
    assert (found["dk_sum"][1, :2] > 10).all()  # the query heads that share its key
    assert (found["dk_sum"][1, 2:] < 1.4).all() and (found["dv_sum"][1] < 1.4).all()
    # The size is the one of the derivation: scale sum_i e_i q_i.
    left = SCALE * torch.einsum("bs,sbd->bd", e[:, 0], seen.q[:, :, 0])
    floor = 0.2123 * 2**-7 * dk[:, :, 0].float().norm()
    assert found["dk_sum"][1, 0] == pytest.approx(float(left.norm() / floor), rel=0.05)


def test_a_sum_that_is_not_that_of_the_weights_is_found_in_dv():
    seen, dout, dk, dv, _ = call()
    found = metrics(measured(seen, dout, dk, (dv.float() * 1.02).bfloat16()))
    assert (found["dv_sum"][1] > 5).all() and (found["dk_sum"][1] < 1.4).all()


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({"sinks": torch.zeros(H)}, set()),
        ({"softcap": True}, {"dv_sum"}),
        ({"dropout_p": 0.1}, {"dk_sum"}),
        ({"geometry": Geometry(scale=1.0, causal=False, window=(1, 1))}, {"dk_sum"}),
    ],
)
def test_what_the_derivation_does_not_cover_is_left_out(change, known):
    found = metrics(measured(*call(**change)[:4]))
    assert {name for name, values in found.items() if not math.isnan(values[1, 0])} == known


def test_under_context_parallelism_the_vectors_are_added_first(monkeypatch):
    """Two ranks with half of the keys and rows each: neither sum is zero, that of both is."""
    seen, dout, dk, dv, _ = call()
    whole = metrics(measured(seen, dout, dk, dv))
    half, sent = slice(0, S // 2), []
    group = SimpleNamespace(size=lambda: 2)
    ranks = [
        measured(seen, dout[part], dk[part], dv[part], cp=group)
        for part in (half, slice(S // 2, S))
    ]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: sent.append(x.clone()))
    for one in ranks:
        kept = dict(one._found), dict(one._dout)
        one.totals()
        one._sums.zero_()
        one._found, one._dout = kept
    both = sent[0] + sent[1]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.copy_(both))
    found = key_metrics(sum(one.totals() for one in ranks).numpy())  # as the world's SUM does
    for name in ("dk_sum", "dv_sum"):
        torch.testing.assert_close(found[name][1], whole[name][1], rtol=1e-3, atol=1e-3)
        assert (metrics(measured(seen, dout[half], dk[half], dv[half]))["dk_sum"][1] > 10).all()


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = ("view", "unsqueeze", "select", "slice", "expand", "permute", "detach", "alias")
        if not any(v in str(func) for v in views):
            self.calls.append(str(func))
        return out


def test_what_it_costs():
    """Launches per layer, those of one observation in `interval` steps.

    dK and dV are read twice, dO once: at s 8192, b 1, 32 query and 8 key/value heads of 128 that is
    134 MB in BF16, beside the 1.4 TFLOP of the layer's backward pass of causal attention.
    """
    seen, dout, dk, dv, _ = call()
    sums = KeySums(layers=2, heads=H, first_head=0, cp=None, device=torch.device("cpu"))
    with Count() as count:
        sums.add_output(seen, dout)
        sums.add_input(seen, "v", dv)
        sums.add_input(seen, "k", dk)
        sums.totals()
    one = len(count.calls)
    assert one <= 36, count.calls
    with Count() as count:
        for layer in range(2):
            seen = replace(seen, site=SimpleNamespace(layer=layer))  # type: ignore[arg-type]
            sums.add_output(seen, dout)
            sums.add_input(seen, "v", dv)
            sums.add_input(seen, "k", dk)
        sums.totals()
    assert len(count.calls) - one <= 6, count.calls  # a further layer
    meta: Any = [x.to("meta") for x in (dout, dk, dv)]  # nothing waits for a device
    measured(seen, *meta, device="meta").totals()
