"""The halves of "compensated" and the float32 O_lo: kernels against what each is said to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import DEVICE, Case
from error_rule import check_case
from regimes import make_regime
from suite import backend_result

from stable_attention import AttentionArgumentError, stable_attention
from stable_attention.chunks import chunk_forward, finish_chunks
from stable_attention.probes import BackendResult, probe
from stable_attention.reference.emulators import COMPENSATED, FLASH2, Rounding, emulate
from stable_attention.stabilizers import ABLATIONS, KNOWN, STABILIZERS

LOW = dataclasses.replace(FLASH2, o_lo="bf16")
SUM = dataclasses.replace(COMPENSATED, o_lo=None)
WHOLE = dataclasses.replace(FLASH2, o_lo="float32")
# (stabilizer, o_lo) and the emulation it must equal.
ROWS = (
    ("low_order_o", "bf16", LOW),
    ("consistent_sum", "bf16", SUM),
    ("low_order_o", "fp32", WHOLE),
    ("compensated", "fp32", dataclasses.replace(COMPENSATED, o_lo="float32")),
)


def report(tensors, result: BackendResult):
    return probe(*tensors, backend=result, layout="bhsd", causal=True, skip_rows=32)


def emulated(tensors, rounding: Rounding):
    q, k, v, dout = tensors
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    e = emulate(q, k, v, dout, rounding=rounding, mask=mask)
    result = BackendResult(out=e.out, lse=e.lse, low=e.low, dq=e.dq, dk=e.dk)
    return report(tensors, result)


@pytest.mark.parametrize("name", [*ABLATIONS, "compensated"])
@pytest.mark.parametrize(
    "line",
    [
        "sq=70 sk=45 hq=4 causal=1",
        "sq=64 sk=64 causal=1 sinks=learned dtype=fp16",
        "layout=thd lens_q=9,37 lens_k=9,37 causal=1 memory=fused",
    ],
)
def test_ablations_pass_the_error_rule(name: str, line: str) -> None:
    o_lo = "fp32" if name == "compensated" else "bf16"
    case = Case.parse(f"{line} stabilizer={name} o_lo={o_lo}")
    check_case(case, again=False).raise_if_bad()


@pytest.mark.parametrize("regime", ["near2", "one"])
def test_each_half_has_the_delta_error_of_its_emulation(regime: str) -> None:
    """And of no other row: the halves differ by factors where the doors they close matter."""
    tensors = [x[None].to(DEVICE) for x in make_regime(regime, heads=2, n=96)]
    for stabilizer, o_lo, rounding in ROWS:
        ours = report(tensors, backend_result(tensors, stabilizer, o_lo))
        theirs = emulated(tensors, rounding)
        # Where nothing is left of the error, kernels and emulation differ in float32 noise.
        assert ours.rms == pytest.approx(theirs.rms, rel=0.15, abs=6e-6), (stabilizer, o_lo)


def test_which_door_each_half_closes() -> None:
    """Near ties need the rounded sum, a saturated sink the low-order part (by the emulation)."""
    near, one = (
        [x[None].to(DEVICE) for x in make_regime(name, heads=2, n=96)] for name in ("near2", "one")
    )
    rms = {
        (regime, name, o_lo): emulated(tensors, rounding).rms
        for regime, tensors in (("near", near), ("one", one))
        for name, o_lo, rounding in (*ROWS, ("compensated", "bf16", COMPENSATED))
    }
    assert rms["near", "low_order_o", "bf16"] > 4 * rms["near", "compensated", "bf16"]
    assert rms["near", "low_order_o", "fp32"] > 4 * rms["near", "compensated", "bf16"]
    assert rms["near", "consistent_sum", "bf16"] > 2 * rms["near", "compensated", "bf16"]
    assert rms["one", "consistent_sum", "bf16"] > 5 * rms["one", "compensated", "bf16"]
    assert rms["one", "low_order_o", "bf16"] < 2 * rms["one", "compensated", "bf16"]


def test_float32_o_lo_restores_the_float32_output() -> None:
    """O_hi + O_lo under "fp32" is what a 16-bit O_lo only approaches."""
    tensors = [x[None].to(DEVICE) for x in make_regime("gauss", heads=2, n=64)]
    q, k, v, _ = tensors
    exact, close = (backend_result(tensors, o_lo=name) for name in ("fp32", "bf16"))
    assert exact.low.dtype == torch.float32 and torch.equal(exact.out, close.out)
    assert torch.equal(exact.low.bfloat16(), close.low)
    out, lse = chunk_forward(q, k, v, layout="bhsd", causal=True, stabilizer="compensated")
    high, low = finish_chunks(out, lse, dtype=q.dtype, layout="bhsd", o_lo="fp32")
    assert torch.equal(high.float() + low, out) and low.dtype == torch.float32


def test_what_ablations_keep_and_that_they_are_not_offered_as_stabilizers() -> None:
    assert not set(ABLATIONS) & set(STABILIZERS) and set(KNOWN) == {*ABLATIONS, *STABILIZERS}
    assert ABLATIONS["projected_key"].saved_bytes(64) == 2 * 64 + 8
    assert ABLATIONS["consistent_sum"].saved_bytes(64) == 2 * 64 + 4
    assert ABLATIONS["low_order_o"].saved_bytes(64) == 4 * 64 + 4
    assert ABLATIONS["low_order_o"].saved_bytes(64, "fp32") == 6 * 64 + 4
    q = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(AttentionArgumentError, match="low_order"):
        stable_attention(q, q, q, stabilizer="low_order")
