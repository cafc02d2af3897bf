"""LSE from the unrounded P is made where somebody asks for it, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from attention_cases import DEVICE, Case, make_inputs
from error_rule import changed_without_lse, run_ours

from stable_attention import stable_attention
from stable_attention.triton.forward import forward_kernel

CASES = [
    "sq=40 sk=70 hq=2 hk=1 d=64 causal=1 sinks=learned",
    "sq=33 sk=33 d=96 dv=32 causal=1 left=7 residual=int8",
    "sq=40 sk=40 d=32 dropout=0.2 softcap=10.0 dtype=fp16",
    "sq=40 sk=70 d=160 causal=1",
    "sq=40 sk=40 d=64 stabilizer=consistent_sum path=late",
    "layout=thd lens_q=20,0,33 lens_k=20,5,40 hq=2 hk=1 d=64 causal=1 sinks=learned",
    "sq=5 sk=3 d=32 causal=1",
    "sq=40 sk=40 d=32 stabilizer=none",
]


@pytest.mark.parametrize("line", CASES)
def test_lse_changes_no_other_bit(line: str) -> None:
    case = Case.parse(line)
    given = make_inputs(case, DEVICE)
    assert changed_without_lse(case, given, run_ours(case, given)) == []


def saved(stabilizer: str, **options: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """O, and the float32 tensors that its backward keeps."""
    q, k, v = (
        torch.randn(1, 24, 2, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    result = stable_attention(q, k, v, stabilizer=stabilizer, **options)
    out = result[0] if isinstance(result, tuple) else result
    kept = [x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == torch.float32]
    return out, kept


@pytest.mark.parametrize("stabilizer", ["compensated", "none"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_backward_keeps_one_number_a_row(stabilizer: str, return_lse: bool) -> None:
    _, kept = saved(stabilizer, return_lse=return_lse)
    assert [tuple(x.shape) for x in kept] == [(1, 2, 24)]


def test_training_leaves_the_unrounded_sum_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the four calls only plain numerics need it without being asked."""
    seen = []
    launch = type(forward_kernel).__getitem__

    def spy(kernel: object, grid: object) -> object:
        run = launch(kernel, grid)
        return lambda *args, **named: seen.append(named["SUM"]) or run(*args, **named)

    monkeypatch.setattr(type(forward_kernel), "__getitem__", spy)
    for stabilizer in ("compensated", "none"):
        for return_lse in (False, True):
            seen.clear()
            q = torch.randn(1, 8, 1, 32, device=DEVICE, dtype=torch.bfloat16)
            stable_attention(q, q, q, stabilizer=stabilizer, return_lse=return_lse)
            assert seen == [return_lse or stabilizer == "none"], (stabilizer, return_lse)
