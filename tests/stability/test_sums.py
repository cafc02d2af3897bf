"""What the telemetry says of a head, against the library's float64 probe on the same rows."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from regimes import make_regime
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patch.attention.backends import BACKENDS
from megatron_patch.stability import sums as sums_module
from megatron_patch.stability.names import HEAD_METRICS, bias_to_signal
from megatron_patch.stability.observe import Seen
from megatron_patch.stability.sampling import Geometry
from megatron_patch.stability.sums import FIELDS, HeadSums, head_metrics
from megatron_patch.stability.warning import Rule
from stable_attention.probes import BackendResult, probe
from stable_attention.reference.emulators import (
    COMPENSATED,
    FLASH2,
    INT8_CODES,
    Rounding,
    emulate,
    half_ulp,
)

N, HEADS, D = 256, 2, 64
SKIP = 32  # rows `pick_rows` leaves out of N


def site(backend: str = "stable_flash", stabilizer: str = "none") -> Any:
    """Stands for an observed module."""
    row = BACKENDS.get(backend)
    exact = row is not None and row.exact_delta
    return SimpleNamespace(layer=1, backend=backend, stabilizer=stabilizer, exact_delta=exact)


def sbhd(x: torch.Tensor) -> torch.Tensor:
    """[h, n, d] -> [n, 1, h, d]."""
    return x.permute(1, 0, 2)[:, None].contiguous()


def seen_of(regime: str, rounding: Rounding, **changes: Any) -> tuple[Seen, torch.Tensor, Any]:
    """A call computed by an emulated kernel, its dO, and the emulation."""
    q, k, v, do = make_regime(regime, heads=HEADS, n=N, d=D, seed=3)
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    done = emulate(*(x[None] for x in (q, k, v, do)), rounding=rounding, mask=mask)
    fields = {
        "site": site(),
        "q": sbhd(q),
        "k": sbhd(k),
        "v": sbhd(v),
        "out": sbhd(done.out[0]),
        "low": sbhd(done.low[0].bfloat16()) if rounding.o_lo else None,
        "max_logits": None,
        "sinks": None,
        "geometry": Geometry(scale=D**-0.5, causal=True),
        "dropout_p": 0.0,
    }
    return Seen(**(fields | changes)), sbhd(do), done


def observe(seen: Seen, do: torch.Tensor) -> dict[str, np.ndarray]:
    """Metrics [2 layers, 4 heads]; the call is layer 1, heads 2 and 3."""
    sums = HeadSums(
        layers=2, heads=4, first_head=2, rows=N, sequences=4, device=torch.device("cpu")
    )
    sums.add(seen, do)
    return head_metrics(*(x.numpy() for x in sums.totals()))


@pytest.mark.parametrize("regime", ["tie2s", "near2", "gauss"])
@pytest.mark.parametrize("rounding", [FLASH2, COMPENSATED], ids=["plain", "compensated"])
def test_growth_noise_by_its_definition(regime, rounding):
    """In float64, over the rows that are sampled: all but the first ones."""
    stabilizer = "compensated" if rounding.o_lo else "none"
    seen, dout, _ = seen_of(regime, rounding, site=site(stabilizer=stabilizer))
    q, k, v, out, do = (
        x[:, 0].double().transpose(0, 1) for x in (seen.q, seen.k, seen.v, seen.out, dout)
    )
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    s = (q @ k.mT * D**-0.5).masked_fill(hidden, -torch.inf)
    p, s = s.softmax(-1), s.masked_fill(hidden, 0.0)
    true = p @ v
    low = 0.0 if seen.low is None else seen.low[:, 0].double().transpose(0, 1)
    e = (do * (out + low - true)).sum(-1)
    ds = p * (do @ v.mT - (do * true).sum(-1, keepdim=True))
    push, growth = (e * (p * s).sum(-1))[:, SKIP:], (ds * s).sum(-1)[:, SKIP:]
    found = observe(seen, dout)["growth_noise"][1, 2:4]
    want = (push.norm(dim=-1) / growth.norm(dim=-1)).numpy()
    # A compensated delta is wrong by so little that float32 attention's own error is a part of it.
    np.testing.assert_allclose(found, want, rtol=3e-2)


@pytest.mark.parametrize("regime", ["tie2s", "near2", "diffuse", "gauss"])
@pytest.mark.parametrize("rounding", [FLASH2, COMPENSATED], ids=["plain", "compensated"])
def test_errors_and_kappa_are_those_of_the_probe(regime, rounding):
    stabilizer = "compensated" if rounding.o_lo else "none"
    seen, do, _ = seen_of(regime, rounding, site=site(stabilizer=stabilizer))
    found = observe(seen, do)
    for h in range(HEADS):
        one = [x[:, :, h : h + 1] for x in (seen.q, seen.k, seen.v, do)]
        low = None if seen.low is None else seen.low[:, :, h : h + 1]
        stored = seen.out[:, :, h : h + 1]

        def judged(low: torch.Tensor | None, one: Any = one, stored: Any = stored) -> Any:
            result = BackendResult(out=stored, low=low)
            return probe(*one, backend=result, layout="sbhd", causal=True, skip_rows=SKIP)

        used = judged(low)
        # 3e-7: what float32 attention is from float64, relative to RMS(delta).
        assert found["used_error_mean"][1, 2 + h] == pytest.approx(used.mean, rel=1e-2, abs=3e-7)
        assert found["used_error_rms"][1, 2 + h] == pytest.approx(used.rms, rel=1e-2, abs=1e-6)
        assert found["kappa"][1, 2 + h] == pytest.approx(used.kappa, rel=1e-2)
        assert found["delta_rms"][1, 2 + h] == pytest.approx(used.rms_delta, rel=1e-2)
        assert found["top_mass"][1, 2 + h] == pytest.approx(used.top_probability, rel=1e-4)
        if low is not None:  # what O alone would have got wrong: the stored part of it
            alone = judged(None).rms
            mine = found["delta_error_rms"][1, 2 + h]
            assert 0.6 * alone < mine < 1.05 * alone
            if regime == "tie2s":
                assert mine == pytest.approx(alone, rel=0.05)
    assert np.isnan(found["kappa"][0]).all() and np.isnan(found["kappa"][1, :2]).all()


def test_the_regime_that_breaks_plain_kernels_stands_out():
    """Coherent error times kappa: the number the warning names heads by."""
    plain, do, _ = seen_of("tie2s", FLASH2)
    bad = observe(plain, do)
    kept, do, _ = seen_of("tie2s", COMPENSATED, site=site(stabilizer="compensated"))
    good = observe(kept, do)
    calm, do, _ = seen_of("gauss", FLASH2)
    calm_found = observe(calm, do)
    here = (1, slice(2, 4))
    signal = {
        name: bias_to_signal(m["used_error_mean"], m["kappa"])[here].min()
        for name, m in (("bad", bad), ("good", good), ("calm", calm_found))
    }
    assert signal["bad"] > Rule().head_signal > 5 * max(signal["good"], signal["calm"])
    assert (np.abs(bad["delta_error_sign"][here]) > 0.8).all()
    # What the compensated kernel says a plain one would do is what the plain one does.
    np.testing.assert_allclose(
        good["delta_error_rms"][here], bad["delta_error_rms"][here], rtol=0.2
    )


def test_sources_by_backend():
    """Vendor kernels are measured, exact ones emulated, dropout leaves only O_lo."""
    seen, do, _ = seen_of("near2", FLASH2, site=site("sdpa_cudnn", ""))
    vendor = observe(seen, do)
    np.testing.assert_array_equal(vendor["used_error_rms"], vendor["delta_error_rms"])
    exact, do, _ = seen_of("near2", FLASH2, site=site("reference", ""))
    emulated = observe(exact, do)
    assert np.isnan(emulated["used_error_rms"]).all()
    here = (1, slice(2, 4))
    np.testing.assert_allclose(
        emulated["delta_error_rms"][here], vendor["delta_error_rms"][here], rtol=0.1
    )
    dropped, do, _ = seen_of("near2", FLASH2, dropout_p=0.1)
    blind = observe(dropped, do)
    for name in ("delta_error_rms", "used_error_rms", "kappa"):
        assert np.isnan(blind[name]).all()
    kept, do, _ = seen_of("near2", COMPENSATED, dropout_p=0.1, site=site(stabilizer="compensated"))
    assert np.isfinite(observe(kept, do)["delta_error_rms"][here]).all()
    # A compensated call whose O_lo was not handed out: what it used is not known.
    hidden, do, _ = seen_of("near2", COMPENSATED, low=None, site=site(stabilizer="compensated"))
    unknown = observe(hidden, do)
    assert np.isnan(unknown["used_error_rms"]).all()
    assert np.isfinite(unknown["delta_error_rms"][here]).all()


def test_int8_o_lo_is_decoded():
    seen, do, _ = seen_of("tie2s", COMPENSATED, site=site(stabilizer="compensated"))
    assert seen.low is not None
    codes = torch.round(seen.low.float() / (half_ulp(seen.out) / INT8_CODES)).to(torch.int8)
    coded = observe(replace(seen, low=codes), do)
    exact = observe(seen, do)
    here = (1, slice(2, 4))
    np.testing.assert_allclose(
        coded["delta_error_rms"][here], exact["delta_error_rms"][here], rtol=0.05
    )


def test_max_logits_are_exact_where_the_backend_says_nothing():
    seen, do, _ = seen_of("one", FLASH2, site=site("sdpa_cudnn", ""))
    scores = torch.einsum("sbhd,tbhd->bhst", seen.q.float(), seen.k.float()) * D**-0.5
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    want = scores.masked_fill(~mask, -math.inf).amax((0, 2, 3))
    np.testing.assert_allclose(observe(seen, do)["max_logit"][1, 2:], want, rtol=1e-6)
    told, do, _ = seen_of("one", FLASH2, max_logits=torch.tensor([7.0, 8.0]))
    assert observe(told, do)["max_logit"][1].tolist()[2:] == [7.0, 8.0]


@pytest.mark.parametrize("limit", [sums_module.HELD_BYTES, 1])
@pytest.mark.parametrize("kind", ["plain", "compensated", "sinks", "dropout", "vendor"])
def test_layers_at_once_are_layers_one_by_one(kind, limit, monkeypatch):
    """Two sequences a layer, and one layer of another kind in between; then no memory for two."""
    monkeypatch.setattr(sums_module, "HELD_BYTES", limit)
    rounding = COMPENSATED if kind in ("compensated", "dropout") else FLASH2
    stabilizer = "compensated" if rounding.o_lo else "none"
    changes: dict[str, Any] = {"site": site(stabilizer=stabilizer)}
    if kind == "sinks":
        changes["sinks"] = torch.tensor([1.5, -0.5])
    if kind == "dropout":
        changes["dropout_p"] = 0.1
    if kind == "vendor":
        changes["site"] = site("sdpa_cudnn", "")

    def layer(number: int, first: str, second: str) -> tuple[Seen, torch.Tensor]:
        """Two sequences."""
        (one, do_1, _), (two, do_2, _) = (seen_of(r, rounding, **changes) for r in (first, second))
        both = {
            name: None if getattr(one, name) is None
            else torch.cat([getattr(one, name), getattr(two, name)], 1)
            for name in ("q", "k", "v", "out", "low")
        }  # fmt: skip
        here = SimpleNamespace(**{**vars(one.site), "layer": number})
        if one.sinks is not None:
            both["sinks"] = one.sinks + number
        return replace(one, site=here, **both), torch.cat([do_1, do_2], 1)

    other, do, _ = seen_of("gauss", FLASH2, site=site("reference", ""), max_logits=torch.ones(2))
    other = replace(other, site=SimpleNamespace(**{**vars(other.site), "layer": 3}))
    calls = [
        layer(0, "tie2s", "gauss"),
        layer(1, "near2", "diffuse"),
        (other, do),
        layer(2, "gauss", "near2"),
    ]

    def found(calls: list[Any], rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
        sums = HeadSums(
            layers=4, heads=2, first_head=0, rows=rows, sequences=4, device=torch.device("cpu")
        )
        sums.clear(phase=5)
        for one in calls:
            sums.add(*one)
        return sums.totals()

    together = found(calls)
    alone = [found([one]) for one in calls]
    torch.testing.assert_close(together[0], sum(a for a, _ in alone), rtol=1e-5, atol=1e-7)
    tops = torch.stack([b for _, b in alone]).amax(0)
    torch.testing.assert_close(together[1], tops, rtol=0, atol=0)
    assert bool(together[1].isfinite().all()) and bool((together[0][..., 0] > 0).all())


def test_what_waits_holds_no_memory_of_the_graph():
    """The recompute of up-projections empties q, k and v once their backward is done, and sinks are
    a parameter, which the optimizer changes before `totals`."""
    sinks = torch.tensor([1.5, -0.5])
    seen, do, _ = seen_of("tie2s", COMPENSATED, site=site(stabilizer="compensated"), sinks=sinks)
    want = observe(seen, do)
    sums = HeadSums(
        layers=2, heads=4, first_head=2, rows=N, sequences=4, device=torch.device("cpu")
    )
    sums.add(seen, do)
    sinks += 3
    for x in (seen.q, seen.k, seen.v, seen.out, seen.low, do):
        assert x is not None
        x.zero_()
        x.untyped_storage().resize_(0)
    found = head_metrics(*(x.numpy() for x in sums.totals()))
    for name, values in want.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("limit", ["HELD_BYTES", "BLOCK_BYTES"])
def test_a_call_that_no_other_fits_beside_is_not_held(limit, monkeypatch):
    """K and V of a long sequence are gigabytes; they would stay through the optimizer's step."""
    seen, do, _ = seen_of(
        "tie2s", COMPENSATED, site=site(stabilizer="compensated"), max_logits=torch.ones(HEADS)
    )
    want = observe(seen, do)
    monkeypatch.setattr(sums_module, limit, 1)
    sums = HeadSums(
        layers=2, heads=4, first_head=2, rows=N, sequences=4, device=torch.device("cpu")
    )
    with Copies() as copies:
        sums.add(seen, do)
    assert seen.k.shape not in copies.found
    for x in (seen.q, seen.k, seen.v, do):
        x.zero_()
    found = head_metrics(*(x.numpy() for x in sums.totals()))
    for name, values in want.items():
        np.testing.assert_array_equal(found[name], values)


class Copies(TorchDispatchMode):
    """Shapes of 16-bit tensors that are cloned; the arithmetic has copies in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and args[0].dtype == torch.bfloat16:
            self.found.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def test_nothing_seen_is_nan_not_zero():
    sums = HeadSums(
        layers=1, heads=1, first_head=0, rows=4, sequences=1, device=torch.device("cpu")
    )
    found = head_metrics(*(x.numpy() for x in sums.totals()))
    assert all(np.isnan(v).all() for v in found.values())
    assert set(HEAD_METRICS) - set(found) == {"wq_norm", "wk_norm", "dk_sum", "dv_sum"}
    assert len(set(FIELDS)) == len(FIELDS)


class NoReads(TorchDispatchMode):
    """Fails on operations that would bring a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        forbidden = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")
        assert not any(word in str(func) for word in forbidden), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_an_observation_waits_for_nothing():
    seen, do, _ = seen_of("near2", FLASH2, max_logits=torch.tensor([7.0, 8.0]))
    sums = HeadSums(
        layers=2, heads=4, first_head=2, rows=16, sequences=1, device=torch.device("cpu")
    )
    with NoReads():
        sums.clear(phase=2)
        sums.add(seen, do)
        with pytest.raises(AssertionError, match="waits for the device"):
            sums.totals()[0][0, 0, 0].item()
