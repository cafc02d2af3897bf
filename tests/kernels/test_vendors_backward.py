"""Backward passes of other libraries with our delta, by torch's flash attention for the CPU."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import DEVICE
from regimes import make_regime

from stable_attention import AttentionArgumentError, fa4, stable_attention, vendors
from stable_attention.chunks import chunk_forward
from stable_attention.describe import describe
from stable_attention.problem import Options, Problem
from stable_attention.triton.backward import backward

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="GPUs: gpu/test_borrowed.py")


def _drawn(layout: str = "bshd", s: int = 48) -> list[torch.Tensor]:
    """q, k, v and dO of a batch of 2 and 2 heads."""
    shape = {"bshd": (2, s, 2, 16), "sbhd": (s, 2, 2, 16), "bhsd": (2, 2, s, 16)}[layout]
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]


def _gradients(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    *inputs, dout = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = stable_attention(*inputs, **options)
    assert isinstance(out, torch.Tensor)
    return list(torch.autograd.grad(out, inputs, dout))


def _close(found: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
    for x, y in zip(found, own, strict=True):
        assert (x.float() - y.float()).norm() < 0.01 * y.float().norm()
        assert x.stride() == y.stride()


@pytest.mark.parametrize("name", ["near2", "one", "kbias"])
def test_errors_are_those_of_our_own_backward(name: str) -> None:
    tensors = [x[None] for x in make_regime(name, heads=2, n=96)]
    *inputs, dout = tensors
    wide = [x.double().requires_grad_() for x in inputs]
    attention = torch.nn.functional.scaled_dot_product_attention
    exact = torch.autograd.grad(attention(*wide, is_causal=True), wide, dout.double())
    plain = [x.clone().requires_grad_() for x in inputs]
    stock = torch.autograd.grad(attention(*plain, is_causal=True), plain, dout)

    def error(found: Any) -> float:
        return float((found[0].double() - exact[0]).norm() / exact[0].norm())

    own, borrowed = (
        error(_gradients(tensors, layout="bhsd", causal=True, backward=name))
        for name in ("own", "sdpa_flash")
    )
    # Our products are rounded once in the interpreter, torch's at every addition.
    assert borrowed <= 1.25 * own
    assert borrowed < 0.5 * error(stock)


@pytest.mark.parametrize(("layout", "causal"), [("bshd", True), ("sbhd", False), ("bhsd", True)])
def test_layouts(layout: str, causal: bool) -> None:
    tensors = _drawn(layout)
    own, found = (
        _gradients(tensors, layout=layout, causal=causal, backward=name)
        for name in ("own", "sdpa_flash")
    )
    _close(found, own)


def test_one_buffer_of_q_k_and_v_gets_one_of_gradients() -> None:
    *_, dout = _drawn()
    wide = torch.cat(_drawn()[:3], -1)
    found = []
    for name in ("own", "sdpa_flash"):
        leaf = wide.clone().requires_grad_()
        out = stable_attention(*leaf.split(16, -1), causal=True, backward=name)
        found.append(torch.autograd.grad(out, leaf, dout))
    _close(found[1], found[0])


def test_sinks_take_their_share_and_get_their_gradient() -> None:
    *inputs, dout = _drawn()
    inputs.append(torch.tensor([0.5, -1.0]))
    found = []
    for name in ("own", "sdpa_flash"):
        *qkv, sinks = leaves = [x.clone().requires_grad_() for x in inputs]
        out = stable_attention(*qkv, causal=True, sinks=sinks, backward=name)
        found.append(list(torch.autograd.grad(out, leaves, dout)))
    assert torch.equal(found[0].pop(), found[1].pop())
    _close(found[1], found[0])


def test_rows_without_a_carrier_have_the_call_served_by_our_own_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same bits, and by one launch for the whole batch."""
    launches: list[int] = []

    def launched(problem: Problem, *tensors: Any, **named: Any) -> Any:
        launches.append(problem.batch)
        return backward(problem, *tensors, **named)

    monkeypatch.setattr(vendors, "backward", launched)
    tensors = _drawn()
    tensors[3][1, 5, 1] = 0
    tensors[3][1, 5, 1, 3] = 1.0
    own, found = (_gradients(tensors, causal=True, backward=n) for n in ("own", "sdpa_flash"))
    assert all(map(torch.equal, found, own))
    assert launches == [2]


def test_a_gradient_of_lse_is_served_by_our_own_backward() -> None:
    q, k, v, dout = _drawn()
    found = []
    for name in ("own", "sdpa_flash"):
        leaf = q.clone().requires_grad_()
        out, lse = stable_attention(leaf, k, v, return_lse=True, backward=name)
        found.append(torch.autograd.grad([out, lse], leaf, [dout, lse.detach()])[0])
    assert torch.equal(*found)


LACKING = {
    "dropout": {"dropout_p": 0.1},
    "softcap": {"softcap": 30.0},
    "window": {"window": (4, 0)},
    "paper_bf16": {"stabilizer": "paper_bf16", "allow_broken": True},
    "deterministic without torch.use_deterministic_algorithms": {"deterministic": True},
}


@pytest.mark.parametrize("lacks", LACKING)
def test_what_a_vendor_lacks_is_refused_in_the_forward(lacks: str) -> None:
    q, k, v, _ = _drawn()
    with pytest.raises(AttentionArgumentError) as raised:
        stable_attention(q, k, v, backward="sdpa_flash", **LACKING[lacks])
    text = str(raised.value)
    assert f"backward is 'sdpa_flash', which lacks {lacks}" in text
    assert "allowed: 'auto', 'own'" in text


def test_without_a_gradient_nothing_is_refused() -> None:
    """Such as one query beside cached keys, of a model that trained with a borrowed backward."""
    q, k, v, _ = _drawn()
    with torch.no_grad():
        found, own = (
            stable_attention(q[:, -1:], k, v, causal=True, backward=x)
            for x in ("sdpa_cudnn", "own")
        )
    assert torch.equal(found, own)


def test_all_that_is_lacking_is_said() -> None:
    q, k, v, _ = _drawn()
    with pytest.raises(AttentionArgumentError, match="lacks causal, sq != sk, gqa, softcap"):
        stable_attention(
            q, k[:, :32, :1], v[:, :32, :1], causal=True, softcap=9.0, backward="sdpa_flash"
        )
    packed = torch.tensor([0, 48], dtype=torch.int32)
    with pytest.raises(AttentionArgumentError, match="lacks varlen"):
        stable_attention(
            q[0], k[0], v[0], layout="thd", cu_seqlens_q=packed, cu_seqlens_k=packed,
            backward="sdpa_flash",
        )  # fmt: skip
    with pytest.raises(AttentionArgumentError, match="architecture interpreter"):
        stable_attention(q, k, v, backward="sdpa_cudnn")
    with pytest.raises(AttentionArgumentError, match=r"backward is 'sdpa_flash'; .*whole sequence"):
        chunk_forward(q, k, v, backward="sdpa_flash")
    with pytest.raises(
        AttentionArgumentError, match="backward is 'vendor'; allowed: 'auto', 'own'"
    ):
        stable_attention(q, k, v, backward="vendor")


def _chosen(**options: Any) -> str | None:
    """Whose backward a call gets; None is our own."""
    q, k, v, _ = _drawn()
    found = vendors.select(describe(q, k, v, Options.of(**options))[0], q.device)
    return None if found is None else found.name


def test_auto_is_our_own_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _chosen() is None
    monkeypatch.setitem(vendors.AUTO, "interpreter", "sdpa_flash")
    assert _chosen() == "sdpa_flash"
    assert _chosen(softcap=9.0) is None and _chosen(backward="own") is None


def test_auto_is_what_the_stored_figures_say() -> None:
    """On sm90: the fastest of those that repeat and keep our errors; nothing where none has run."""
    stored = json.loads((ROOT / "docs" / "assets" / "borrowed.json").read_text())
    rows = [r["dq"] for part in ("errors", "captures") for r in stored[part]["rows"]]
    times = [r for part, x in stored.items() if part.startswith("speed") for r in x["rows"]]
    ratios: dict[str, float] = {"own": 1.0}
    for row in (
        x for x in vendors.VENDORS if {"sm90"} <= x.archs and "deterministic" in x.features
    ):
        key = "fa4 deterministic" if row.name == "fa4" else row.name
        found = [r[key]["backward"] / r["own"]["backward"] for r in times if key in r]
        if found and all(dq.get(row.name, math.inf) <= 1.1 * dq["own"] for dq in rows):
            ratios[row.name] = statistics.geometric_mean(found)
    fastest = min(ratios, key=lambda name: ratios[name])
    assert ({} if fastest == "own" else {"sm90": fastest}) == vendors.AUTO


@pytest.mark.parametrize("o_lo", ["int8", "fp32"])
def test_how_o_lo_is_stored_is_nothing_to_a_vendor(o_lo: str) -> None:
    assert _chosen(o_lo=o_lo, backward="sdpa_flash") == "sdpa_flash"


def test_the_default_is_not_spelled_out_in_a_spec() -> None:
    assert Options.of().backward == "auto"


@pytest.fixture
def looked_at_anew() -> Iterator[None]:
    fa4.missing.cache_clear()
    yield
    fa4.missing.cache_clear()


@pytest.mark.usefixtures("looked_at_anew")
def test_fa4_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = _drawn()

    def absent(_name: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", absent)
    remedy = f"pip install flash-attn-4=={fa4.VERSION}"
    with pytest.raises(AttentionArgumentError, match=f"flash-attn-4 is not installed.*{remedy}"):
        stable_attention(q, k, v, backward="fa4")
    fa4.missing.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda _name: "4.0.0")
    assert fa4.missing().startswith(f"flash-attn-4 is 4.0.0, not {fa4.VERSION}")
    fa4.missing.cache_clear()
    monkeypatch.setattr(metadata, "version", lambda _name: fa4.VERSION)
    assert "cannot be imported" in fa4.missing()


def test_fa4_must_do_with_a_gradient_of_lse_what_it_is_here_for() -> None:
    def run(dout, q, k, v, out, lse, dlse, *, factor=1.0, **_):
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * 0.125
        p = scores.masked_fill(torch.ones(128, 128).triu(1).bool(), -torch.inf) - lse[..., None]
        p = p.exp()
        ds = torch.einsum("bihd,bjhd->bhij", dout.float(), v.float()) + factor * dlse[..., None]
        ds = p * ds * 0.125
        return (
            torch.einsum("bhij,bjhd->bihd", ds, k.float()),
            torch.einsum("bhij,bihd->bjhd", ds, q.float()),
            torch.einsum("bhij,bihd->bjhd", p, dout.float()),
        )

    with torch.no_grad():  # as in a backward pass
        fa4.self_test(-1, torch.bfloat16, run)
    with pytest.raises(RuntimeError, match="dQ is off by"):
        fa4.self_test(-1, torch.bfloat16, lambda *x, **y: run(*x, factor=0.0, **y))


FA4 = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from stable_attention import fa4
how = {"scale": 0.1, "window": (-1, 0), "deterministic": False}
with FakeTensorMode():
    q, k, v, out, dout = (
        torch.empty(1, 512, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(5)
    )
    lse, dlse = (torch.empty(1, 2, 512, device="cuda") for _ in range(2))
    fa4.attention(q, k, v, **how)
    fa4._backward(dout, q, k, v, out, lse, dlse, **how)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_fa4_compiles_without_a_gpu(arch: str) -> None:
    if why := fa4.missing():
        pytest.skip(why)
    target = {"FLASH_ATTENTION_ARCH": arch, "CUTE_DSL_ARCH": f"{arch}a"}
    environment = os.environ | target | {"FLASH_ATTENTION_NUM_SMS": "132"}
    subprocess.run([sys.executable, "-c", FA4], env=environment, check=True, timeout=900)
